"""Decodes one image: from the client's bytes to the uint8 RGB rows that a worker reads.

Pillow decodes, six formats and no other; the size is read from the header and judged before a pixel is decoded. What
the header does not tell is bounded too: the first frame only, no more than a usual number of JPEG scans, no tile of a
TIFF larger than an image may be, and of a resize only the part that stays. Pure but for Pillow; slow, so called on threads, where Pillow lets the interpreter go.
Source of every step after decoding: transformers 5.23 image_processing_backends.py (PilBackend), image_transforms.py.
"""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from sie.values.card import ImageRule
from sie.values.errors import BadRequest

FORMATS: Final = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
"""What is decoded, by content. Pillow calls a JPEG that holds several pictures MPO; its first one is read."""
_SCAN_MARKER: Final = b"\xff\xda"
_MAX_JPEG_SCANS: Final = 100
"""Every scan passes over the whole image, however few bytes it has; encoders write about ten."""
_UNBOUNDED_MODES: Final = frozenset(("I", "F"))
"""32-bit integers and floats: nothing says which value is white."""
_TILE_SIZE: Final = (322, 323)
"""Tags of a TIFF: width and height of its tiles."""
_MAX_SLIVER: Final = 32
"""From this ratio of its sides on an image is a sliver."""
_MAX_REDUCTION: Final = 8
"""How many times the square's side an image that becomes one may measure: that bounds the worker's work."""
_STRIP_PIXELS: Final = 1 << 20
_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each EXIF orientation. Source: EXIF 2.32, tag 0x0112."""

Image.MAX_IMAGE_PIXELS = None  # ours is judged instead; Pillow's own would only warn, on stderr


def open_image(data: memoryview, path: str, max_pixels: int) -> Image.Image:
    """Return an image of which only the header has been read. path is where it stands in the request.

    Raises BadRequest for what is none, and for one of more pixels than max_pixels.
    """
    encoded = bytes(data)
    try:
        image: Image.Image = Image.open(io.BytesIO(encoded), formats=FORMATS)
    except Exception:  # each decoder fails in its own way on bytes that are not its own
        raise _undecodable(path) from None
    width, height = image.size
    if width * height > max_pixels:
        raise BadRequest(f"image has {width} x {height} pixels, over max_image_pixels ({max_pixels}) - at `{path}`")
    tile_width, tile_height = _tile_size(image)
    if tile_width * tile_height > max_pixels:
        raise BadRequest(
            f"image has tiles of {tile_width} x {tile_height} pixels, over max_image_pixels ({max_pixels}) - at `{path}`"
        )
    if image.mode in _UNBOUNDED_MODES:
        raise BadRequest(f"image has 32 bits a channel, which has no defined white - at `{path}`")
    is_jpeg = image.format in ("JPEG", "MPO")
    if not width * height or (is_jpeg and encoded.count(_SCAN_MARKER) > _MAX_JPEG_SCANS):
        raise _undecodable(path)
    return image


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """Return (width, height) of a TIFF's tiles, which are decoded whole however small the image is; else (0, 0)."""
    tags: Any = getattr(image, "tag_v2", {})
    width, height = (tags.get(tag) for tag in _TILE_SIZE)
    return (width, height) if isinstance(width, int) and isinstance(height, int) else (0, 0)


def decode_image(image: Image.Image, path: str) -> Image.Image:
    """Return an opened image as upright RGB in its own size; of an animation the first frame.

    What is transparent lies on white. 16-bit grey keeps its high byte. Raises BadRequest for damaged or truncated data.
    """
    try:
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        rgb = _to_rgb(image)
        return rgb if turn is None else rgb.transpose(turn)
    except Exception:  # as in `open_image`
        raise _undecodable(path) from None


def prepare_image(image: Image.Image, rule: ImageRule) -> NDArray[np.uint8]:
    """Return (h, w, 3) uint8: the image resized and cut as the rule says, or as it is when the rule has no size.

    One that the worker makes a square is as it is, too, unless it is far larger than that.

    Of a sliver only the part that stays is computed: one pixel by a million would be enlarged to a bomb. Pillow may
    then pass over columns and rows in another order, which shows where a filter overshoots; otherwise every byte is
    what resizing and cutting gives.
    """
    width, height = image.size
    if rule.longest:
        height, width = fitted_size(height, width, rule)
        return np.asarray(image.resize((width, height), Image.Resampling(rule.resample)), np.uint8)
    if rule.square:
        return np.asarray(_within(image, _MAX_REDUCTION * rule.square), np.uint8)
    if not rule.height:
        return np.asarray(image, np.uint8)
    full_height, full_width = resized_size(height, width, rule)
    top, left = (full_height - rule.height) // 2, (full_width - rule.width) // 2
    resample = Image.Resampling(rule.resample)
    part = (left, top, left + rule.width, top + rule.height)
    if full_height * full_width <= _MAX_SLIVER * rule.height * rule.width:
        resized = image.resize((full_width, full_height), resample).crop(part)
    else:
        x, y = width / full_width, height / full_height
        box = (part[0] * x, part[1] * y, min(part[2] * x, width), min(part[3] * y, height))
        resized = image.resize((rule.width, rule.height), resample, box=box)
    return np.asarray(resized, np.uint8)


def resized_size(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """Return (height, width) of an image after resizing and before the centre is cut out."""
    if not rule.keep_aspect:
        return rule.resize
    edge = rule.resize[0]
    longer = int(edge * max(height, width) / min(height, width))
    return (longer, edge) if width <= height else (edge, longer)


def fitted_size(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """Return (height, width) of an image whose shorter side gets its length unless the longer one is too long then.

    At least one pixel, where the source has none. Source: transformers 5.23 image_transforms.py,
    get_size_with_aspect_ratio.
    """
    edge = float(rule.resize[0])
    shorter, longer = min(height, width), max(height, width)
    if longer / shorter * edge > rule.longest:
        edge = rule.longest * shorter / longer
    short = round(edge)
    if short == shorter:
        return height, width
    # What is rounded to is one side; the other follows from what it was before that.
    long = int(edge * longer / shorter)
    short, long = max(short, 1), max(long, 1)
    return (long, short) if width < height else (short, long)


def _within(image: Image.Image, max_side: int) -> Image.Image:
    """Return an image that no side of is longer; a larger one is averaged down to it."""
    width, height = image.size
    if max(width, height) <= max_side:
        return image
    scale = max_side / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return image.resize(size, Image.Resampling.BOX)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 when there is none that can be read: damaged metadata is not a damaged image."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """Compose an image with transparency onto white, strip by strip: at once it would take five times its memory."""
    width, height = image.size
    flat = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        flat.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return flat


def _undecodable(path: str) -> BadRequest:
    """Return the error of the reference; the decoder's own words may hold addresses.

    Source: SIE API reference, section 8; fault sheet S18.
    """
    return BadRequest(f"image data is not a decodable image - at `{path}`")
