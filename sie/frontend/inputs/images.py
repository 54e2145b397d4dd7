"""Decodes one image: from the client's bytes to the uint8 RGB rows that a worker reads.

Pillow decodes only six formats. The size is read from the header and checked before any pixel is decoded. Other costs
are bounded too: only the first frame is read, JPEG scans, the reads of a decoder and the values of a TIFF's or EXIF's directory are
limited, a TIFF tile is at most as large as an image, and a resize computes only the part that is kept. Pure except for Pillow. It is slow, so it runs on threads, where Pillow
releases the interpreter lock.
Source of every step after decoding: transformers 5.23 image_processing_backends.py (PilBackend), image_transforms.py.
"""

from __future__ import annotations

import io
import logging
import warnings
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from sie.values.card import ImageRule
from sie.values.errors import BadRequest

FORMATS: Final = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")
"""Formats that are decoded, detected by content. Pillow calls a JPEG with several pictures MPO; the first is read."""
_SCAN_MARKER: Final = b"\xff\xda"
_MAX_JPEG_SCANS: Final = 100
"""Every scan processes the whole image, even if it has few bytes; encoders write about ten."""
_MAX_READS: Final = 100_000
"""Pillow reads segments and chunks of a file in Python: a million empty ones take seconds. A 34 MB file of a camera or a
scanner takes a tenth of this."""
_MAX_TAG_VALUES: Final = 65_536
"""Pillow makes Python objects of the numbers in a directory of tags: four million strips of a TIFF take 23 s and 1.5 GB."""
_MAX_TAGS: Final = 4096
"""Pillow looks up the name of each tag, and warns of each damaged one: 60,000 take seconds. Cameras write about a hundred."""
_REPEATED: Final = ((b"\xff\xd8", b"Exif\0\0"), (b"\x89PNG", b"iCCP"))
"""(start of a format, a part that is costly to repeat). For each EXIF segment of a JPEG, Pillow copies all those before it; it
decompresses each colour profile of a PNG, up to 1 MiB. Most files have one; a segment of EXIF has up to 64 KiB."""
_MAX_REPEATED: Final = 64
_UNBOUNDED_MODES: Final = frozenset(("I", "F"))
"""32-bit integers and floats, for which no value is defined as white."""
_TILE_SIZE: Final = (322, 323)
"""Tags of a TIFF: width and height of its tiles."""
_MAX_SLIVER: Final = 32
"""An image is a sliver if it grows to over this many times the target's area before the centre is cut out."""
_MAX_FRAMES: Final = 4
"""Pixels of an image between the two steps of resizing into a frame, in frames."""
_MAX_REDUCTION: Final = 8
"""Most times the square's side that an image may measure before the worker makes it square; bounds its work."""
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
"""The operation that undoes each EXIF orientation. Source: EXIF 2.32, tag 0x0112."""

Image.MAX_IMAGE_PIXELS = None  # we check max_image_pixels instead; Pillow's limit would only warn on stderr


class _CountedFile(io.BytesIO):
    """A file that a decoder may read only so often."""

    num_left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.num_left -= 1
        if self.num_left < 0:
            raise OSError("an image of too many parts")
        return super().read(size)


_load_directory: Final = ImageFileDirectory_v2.load


def _load_bounded(self: ImageFileDirectory_v2, fp: IO[bytes]) -> None:
    """Read a directory of a TIFF or of EXIF, and refuse it if it has too many tags, or numbers to make objects of."""
    if _num_tags(self, fp) > _MAX_TAGS:
        raise OSError("an image of too many parts")
    _load_directory(self, fp)
    units, values = self._load_dispatch, self._tagdata  # pyright: ignore[reportPrivateUsage]  # `self` is Pillow's
    sizes = ((units[self.tagtype[tag]][0], len(data)) for tag, data in values.items())
    if sum(size // unit for unit, size in sizes if unit > 1) > _MAX_TAG_VALUES:
        raise OSError("an image of too many parts")


def _num_tags(directory: ImageFileDirectory_v2, fp: IO[bytes]) -> int:
    """Return the number of tags that a directory announces; the file's position stays."""
    start = fp.tell()
    announced = fp.read(8 if directory._bigtiff else 2)  # pyright: ignore[reportPrivateUsage]  # as above
    fp.seek(start)
    return int.from_bytes(announced, "big" if directory.prefix == b"MM" else "little")


ImageFileDirectory_v2.load = _load_bounded  # Pillow has no limit of its own, and reads these in several places


def silence_decoders() -> None:
    """Let this process ignore Pillow's warnings and debug lines: a client's image can cause thousands of each."""
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.INFO)


def open_image(data: memoryview, path: str, max_pixels: int) -> Image.Image:
    """Return an image after reading only its header. path is its place in the request.

    Raises BadRequest for undecodable data, and for an image or tile of more pixels than max_pixels.
    """
    encoded = bytes(data)
    if any(encoded.startswith(start) and encoded.count(part) > _MAX_REPEATED for start, part in _REPEATED):
        raise _undecodable(path)
    try:
        image: Image.Image = Image.open(_CountedFile(encoded), formats=FORMATS)
    except Exception:  # each decoder raises different errors on foreign bytes
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


def keep_position(image: Image.Image) -> None:
    """Let an opened TIFF be decoded as it is stored, like other formats; Pillow would turn it upright by itself."""
    if isinstance(image, TiffImageFile):
        image._size = image._tile_size  # pyright: ignore[reportPrivateUsage]  # Pillow has no option for it
        image.getexif = Image.Exif  # without a tag, and so without an orientation


def _tile_size(image: Image.Image) -> tuple[int, int]:
    """Return (width, height) of a TIFF's tiles, or (0, 0). Tiles are decoded whole, even for a small image."""
    tags: Any = getattr(image, "tag_v2", {})
    width, height = (tags.get(tag) for tag in _TILE_SIZE)
    return (width, height) if isinstance(width, int) and isinstance(height, int) else (0, 0)


def decode_image(image: Image.Image, path: str) -> Image.Image:
    """Return an opened image as upright RGB in its original size; of an animation the first frame.

    Transparent pixels are put on white. 16-bit grey keeps its high byte. Raises BadRequest for damaged or truncated
    data.
    """
    try:
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        rgb = _to_rgb(image)
        return rgb if turn is None else rgb.transpose(turn)
    except Exception:  # as in `open_image`
        raise _undecodable(path) from None


def prepare_image(image: Image.Image, rule: ImageRule) -> NDArray[np.uint8]:
    """Return (h, w, 3) uint8: the image resized and cut by the rule, or unchanged when the rule has no size.

    An image that the worker makes square is also unchanged, unless it is far larger than the square.

    For a sliver only the kept part is computed, because one pixel by a million would need huge memory. Pillow may
    then process columns and rows in another order, which shows where a filter overshoots. Otherwise every byte equals
    the result of resizing and cutting.
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
    if rule.frames:
        return _framed(image, rule, (full_height, full_width), resample)
    part = (left, top, left + rule.width, top + rule.height)
    if full_height * full_width <= _MAX_SLIVER * rule.height * rule.width:
        resized = image.resize((full_width, full_height), resample).crop(part)
    else:
        x, y = width / full_width, height / full_height
        box = (part[0] * x, part[1] * y, min(part[2] * x, width), min(part[3] * y, height))
        resized = image.resize((rule.width, rule.height), resample, box=box)
    return np.asarray(resized, np.uint8)


def _framed(
    image: Image.Image, rule: ImageRule, size: tuple[int, int], resample: Image.Resampling
) -> NDArray[np.uint8]:
    """Return the image resized to size, then to fit into the rule's frame, with black around it.

    For an image over five times as long as wide only the second step is done. Source: transformers 5.23 image_processing_pil_donut.py.
    """
    height, width = size
    if height * width <= _MAX_FRAMES * rule.height * rule.width:
        image = image.resize((width, height), resample)
    height, width = framed_size(height, width, rule)
    if image.size != (width, height):
        image = image.resize((width, height), resample)
    top, left = (rule.height - height) // 2, (rule.width - width) // 2
    framed = np.zeros((rule.height, rule.width, 3), np.uint8)
    framed[top : top + height, left : left + width] = np.asarray(image)
    return framed


def framed_size(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """Return (height, width) of an image that fits into the rule's frame; each side is at least one pixel."""
    inner_height, inner_width = min(height, rule.height), min(width, rule.width)
    if (inner_height, inner_width) == (height, width):
        return height, width
    if height > width:
        inner_width = int(width * inner_height / height)
    elif width > height:
        inner_height = int(height * inner_width / width)
    return max(inner_height, 1), max(inner_width, 1)


def resized_size(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """Return (height, width) of an image after resizing, before the centre is cut out."""
    if not rule.keep_aspect:
        return rule.resize
    edge = rule.resize[0]
    longer = int(edge * max(height, width) / min(height, width))
    return (longer, edge) if width <= height else (edge, longer)


def fitted_size(height: int, width: int, rule: ImageRule) -> tuple[int, int]:
    """Return (height, width) with the rule's shorter side, or smaller when the longer side would exceed its limit.

    Each side is at least one pixel, where the source would give 0. Source: transformers 5.23 image_transforms.py,
    get_size_with_aspect_ratio.
    """
    edge = float(rule.resize[0])
    shorter, longer = min(height, width), max(height, width)
    if longer / shorter * edge > rule.longest:
        edge = rule.longest * shorter / longer
    short = round(edge)
    if short == shorter:
        return height, width
    # The shorter side is rounded; the longer side is computed from the unrounded value.
    long = int(edge * longer / shorter)
    short, long = max(short, 1), max(long, 1)
    return (long, short) if width < height else (short, long)


def _within(image: Image.Image, max_side: int) -> Image.Image:
    """Return an image with both sides at most max_side; a larger image is averaged down."""
    width, height = image.size
    if max(width, height) <= max_side:
        return image
    scale = max_side / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return image.resize(size, Image.Resampling.BOX)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, or 1 when it cannot be read; an image with damaged metadata is still served."""
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
    """Compose a transparent image onto white, in strips; all at once would take five times its memory."""
    width, height = image.size
    flat = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // width)
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        flat.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return flat


def _undecodable(path: str) -> BadRequest:
    """Return the error text of the API reference; the decoder's message may contain memory addresses.

    Source: SIE API reference, section 8; fault sheet S18.
    """
    return BadRequest(f"image data is not a decodable image - at `{path}`")
