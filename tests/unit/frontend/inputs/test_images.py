"""One image: which formats are decoded, what is refused before decoding, and that every byte equals the library's."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import ExifTags, Image, TiffTags
from transformers.image_transforms import get_size_with_aspect_ratio

from sie.frontend.inputs.images import FORMATS, decode_image, fitted_size, open_image, prepare_image
from sie.values.card import ImageRule
from sie.values.errors import BadRequest

PATH = "$.items[2].images[1].data"
UNDECODABLE = f"image data is not a decodable image - at `{PATH}`"
CLIP = ImageRule(height=224, width=224, resize=(224, 224), keep_aspect=True)
SIGLIP = ImageRule(height=96, width=96, resize=(96, 96))
FITTED = ImageRule(resize=(96, 96), keep_aspect=True, longest=150, resample=2)


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decode(data: bytes, max_pixels: int = 1 << 20) -> np.ndarray:
    return np.asarray(decode_image(open_image(memoryview(data), PATH, max_pixels), PATH))


def refusal(data: bytes, max_pixels: int = 1 << 20) -> str:
    with pytest.raises(BadRequest) as caught:
        decode(data, max_pixels)
    assert caught.value.code == "INVALID_INPUT"
    return caught.value.message


def png_claiming(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size that its few bytes cannot fill."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    parts = (struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
             for name, body in chunks)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiled_tiff(width: int, height: int, tile: int) -> bytes:
    """Return a TIFF of black pixels in one tile."""
    data = zlib.compress(bytes(3 * tile * tile))
    end = 8 + 2 + 12 * 9 + 4
    entries = [(256, 1, width), (257, 1, height), (258, 3, end), (259, 1, 8), (262, 1, 2), (277, 1, 3), (322, 1, tile),
               (323, 1, tile), (324, 1, end + 6)]  # fmt: skip
    fields = b"".join(struct.pack("<HHII", tag, 3 if tag == 258 else 4, count, value) for tag, count, value in entries)
    return b"II*\0\x08\0\0\0\x09\0" + fields + bytes(4) + struct.pack("<3H", 8, 8, 8) + data


@pytest.mark.parametrize("kind", FORMATS)
def test_every_listed_format_is_decoded_by_content(kind: str):
    grey = Image.fromarray(np.repeat(noise(9, 7, 1) // 16 * 16, 3, axis=2))  # few colours: a GIF has 256
    options = {"lossless": True} if kind == "WEBP" else {}
    rows = decode(encoded(grey, kind, **options))
    assert rows.shape == (9, 7, 3)
    assert rows.dtype == np.uint8
    if kind != "JPEG":
        assert np.array_equal(rows, np.asarray(grey))


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "JPEG2000", "EPS"])
def test_no_other_decoder_ever_runs(kind: str):
    assert refusal(encoded(Image.fromarray(noise(16, 16)), kind)) == UNDECODABLE


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG", b"GIF89a", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"II*\0", b"BM", b"text"]
)
def test_what_is_no_image_gets_the_fixed_text(data: bytes):
    assert refusal(data) == UNDECODABLE


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_is_refused(kind: str):
    data = encoded(Image.fromarray(noise(64, 64)), kind)
    assert refusal(data[: len(data) // 2]) == UNDECODABLE


def test_a_size_over_the_cap_is_refused_before_anything_is_decoded():
    began_s = time.process_time()
    message = refusal(png_claiming(60_000, 60_000), max_pixels=1 << 25)
    assert message == f"image has 60000 x 60000 pixels, over max_image_pixels (33554432) - at `{PATH}`"
    assert time.process_time() - began_s < 5.0, "its 10 GB of pixels take far longer"


def test_the_cap_counts_pixels_exactly():
    data = encoded(Image.new("RGB", (20, 10)), "PNG")
    assert decode(data, max_pixels=200).shape == (10, 20, 3)
    assert "over max_image_pixels (199)" in refusal(data, max_pixels=199)


def test_tiles_of_a_tiff_count_as_pixels_however_small_the_image():
    assert decode(tiled_tiff(5, 3, 32), max_pixels=1024).shape == (3, 5, 3)
    message = refusal(tiled_tiff(5, 3, 32), max_pixels=1023)
    assert message == f"image has tiles of 32 x 32 pixels, over max_image_pixels (1023) - at `{PATH}`"


def test_an_image_without_pixels_is_refused():
    assert refusal(b"GIF89a\0\0\0\0\0\0\0\x2c\0\0\0\0\0\0\0\0\0\x02\0\x3b") == UNDECODABLE


def test_a_jpeg_of_countless_scans_is_refused():
    plain = encoded(Image.fromarray(noise(32, 32)), "JPEG", progressive=True)
    scan = plain[plain.rindex(b"\xff\xda") : -2]
    assert decode(plain[:-2] + scan * 20 + plain[-2:]).shape == (32, 32, 3)
    assert refusal(plain[:-2] + scan * 200 + plain[-2:]) == UNDECODABLE


def parts_flood(kind: str) -> bytes:
    """Return an image of one pixel behind a million parts that mean nothing."""
    whole = io.BytesIO()
    Image.new("L", (1, 1)).save(whole, kind)
    data = whole.getvalue()
    mark, part = {
        "JPEG": (b"\xff\xdb", b"\xff\xe5\0\2"),
        "GIF": (b"\x2c", b"\x21\xfe\1a\0"),
        "PNG": (b"", b"\0\0\0\3tEXtk\0v" + zlib.crc32(b"tEXtk\0v").to_bytes(4, "big")),
    }[kind]
    place = 33 if kind == "PNG" else data.rindex(mark)  # behind IHDR; before the tables; before the picture
    return data[:place] + part * 1_000_000 + data[place:]


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "PNG"])
def test_image_of_countless_parts_is_refused_at_once(kind: str):
    data, began_s = parts_flood(kind), time.process_time()
    with pytest.raises(BadRequest, match="not a decodable image"):
        decode_image(open_image(memoryview(data), "$", 100), "$")
    assert time.process_time() - began_s < 1.0


def striped_tiff(num_strips: int) -> bytes:
    """Return a grey TIFF of one pixel a row, each row in a strip of its own, all at the same place of the file."""
    tags = [(256, 4, 1, 1), (257, 4, 1, num_strips), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1),
            (273, 4, num_strips, 122), (277, 3, 1, 1), (278, 4, 1, 1), (279, 4, num_strips, 122 + 4 * num_strips)]  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    places = struct.pack("<I", 122 + 8 * num_strips) * num_strips
    return b"II*\0\x08\0\0\0" + directory + places + struct.pack("<I", 1) * num_strips + b"\x07"


def exif_of(kind: int, num_values: int, value_bytes: int) -> bytes:
    """Return EXIF whose orientation has many values."""
    head = struct.pack("<HHHII", 1, ExifTags.Base.Orientation, kind, num_values, 26)
    return b"Exif\0\0II*\0\x08\0\0\0" + head + bytes(4) + bytes(num_values * value_bytes)


def repeated_exif(times: int) -> bytes:
    plain = encoded(Image.new("RGB", (8, 8)), "JPEG")
    part = b"Exif\0\0" + bytes(65_000)
    return plain[:2] + (b"\xff\xe1" + struct.pack(">H", len(part) + 2) + part) * times + plain[2:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: striped_tiff(4_000_000),
        lambda: repeated_exif(500),
        lambda: encoded(Image.new("RGB", (8, 8)), "PNG", exif=exif_of(5, 3_000_000, 8)),
        lambda: encoded(Image.new("RGB", (8, 8)), "WEBP", exif=exif_of(3, 8_000_000, 2)),
    ],
    ids=["strips", "repeated", "png", "webp"],
)
@pytest.mark.timing
def test_countless_numbers_of_a_directory_take_little_time_and_memory(make: Callable[[], bytes]):
    """Pillow made an object of each: four million strips took 23 s and 1.5 GB, EXIF repeated 500 times 1.4 s."""
    data, began_s = make(), time.process_time()
    tracemalloc.start()
    with contextlib.suppress(BadRequest):
        decode(data, 1 << 26)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - began_s < 0.5
    assert peak < 6 * len(data)  # PNG's chunk and EXIF are copied five times


def test_directory_of_countless_tags_is_refused_unread(monkeypatch: pytest.MonkeyPatch):
    plain = encoded(Image.new("L", (2, 2)), "TIFF")
    place = int.from_bytes(plain[4:8], "little")
    monkeypatch.setattr(TiffTags, "lookup", lambda *_: pytest.fail("Pillow looked up a tag"))
    assert refusal(plain[:place] + struct.pack("<H", 60_000) + bytes(12 * 60_000 + 4)) == UNDECODABLE


def test_png_of_countless_colour_profiles_is_refused():
    """Pillow decompressed each, up to a mebibyte: 2,000 took 7 s."""
    plain = encoded(Image.new("L", (2, 2)), "PNG")
    body = b"iCCPk\0\0" + zlib.compress(bytes(100))
    profile = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    assert decode(plain[:33] + profile + plain[33:]).shape == (2, 2, 3)
    assert refusal(plain[:33] + profile * 100 + plain[33:]) == UNDECODABLE


def test_directories_of_real_sizes_are_read():
    assert decode(striped_tiff(20_000)).tolist() == [[[7, 7, 7]]] * 20_000
    assert decode(repeated_exif(3)).shape == (8, 8, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation: int):
    upright = noise(6, 4)
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1],
        5: upright.swapaxes(0, 1), 6: np.rot90(upright), 7: upright[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    assert np.array_equal(decode(encoded(image, "PNG", exif=exif)), upright)


def test_damaged_exif_is_not_a_damaged_image():
    image = Image.fromarray(noise(8, 8))
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0II*\0\x08\0\0\0\xff\xff"):
        assert np.array_equal(decode(encoded(image, "PNG", exif=exif)), np.asarray(image))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "LA", "RGBA", "PA", "CMYK", "YCbCr"])
def test_every_mode_becomes_the_library_s_rgb(mode: str):
    source = Image.fromarray(noise(12, 10, 4), "RGBA")
    image = source.convert("RGB").convert(mode) if mode in ("CMYK", "YCbCr", "P", "1") else source.convert(mode)
    expected = transformers.image_transforms.convert_to_rgb(image, return_numpy=True)
    assert np.array_equal(np.asarray(decode_image(image, PATH)), expected)


def test_transparency_lies_on_white():
    clear = Image.new("RGBA", (3, 3), (200, 0, 0, 0))
    assert (decode(encoded(clear, "PNG")) == 255).all()
    palette = Image.new("P", (3, 3), 0)
    assert (decode(encoded(palette, "GIF", transparency=0)) == 255).all()


def test_a_large_transparent_image_is_composed_in_strips_without_a_seam():
    image = Image.fromarray(noise(700, 2000, 4), "RGBA")  # more than one strip
    expected = transformers.image_transforms.convert_to_rgb(image, return_numpy=True)
    assert np.array_equal(np.asarray(decode_image(image, PATH)), expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_grey_keeps_its_high_byte(kind: str):
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16) + 77
    rows = decode(encoded(Image.fromarray(values), kind))
    assert np.array_equal(rows, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_channels_without_a_white_are_refused(dtype: type):
    assert "no defined white" in refusal(encoded(Image.fromarray(np.ones((4, 4), dtype)), "TIFF"))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_an_animation_the_first_frame_is_read(kind: str):
    frames = [Image.new("RGB", (8, 8), (shade, shade, shade)) for shade in (40, 200)]
    options = {"lossless": True} if kind == "WEBP" else {}
    rows = decode(encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    assert (rows == 40).all()


@pytest.mark.parametrize(
    ("rule", "processor"),
    [
        (CLIP, transformers.CLIPImageProcessorPil(do_rescale=False, do_normalize=False)),
        (SIGLIP, transformers.SiglipImageProcessorPil(
            do_rescale=False, do_normalize=False, size={"height": 96, "width": 96})),
        (FITTED, transformers.GroundingDinoImageProcessorPil(
            do_rescale=False, do_normalize=False, do_pad=False, size={"shortest_edge": 96, "longest_edge": 150})),
    ],
    ids=["clip", "siglip", "fitted"],
)  # fmt: skip
@pytest.mark.parametrize("size", [(224, 224), (1, 1), (7, 200), (200, 7), (333, 251), (97, 640), (225, 224)])
def test_every_byte_is_that_of_the_library_s_processor(rule: ImageRule, processor: Any, size: tuple[int, int]):
    image = Image.fromarray(noise(*size, seed=sum(size)))
    expected = np.moveaxis(processor(image, return_tensors="np")["pixel_values"][0], 0, -1)
    found = prepare_image(image, rule)
    assert found.dtype == np.uint8
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("resample", range(6))
def test_every_filter_is_pillow_s(resample: int):
    image = Image.fromarray(noise(50, 40))
    expected = image.resize((96, 96), Image.Resampling(resample))
    rule = ImageRule(height=96, width=96, resize=(96, 96), resample=resample)
    assert np.array_equal(prepare_image(image, rule), np.asarray(expected))


@pytest.mark.parametrize("size", [(1, 2_000_000), (2_000_000, 1), (3, 900_000)])
def test_a_sliver_is_not_enlarged_to_a_bomb(size: tuple[int, int]):
    rows = prepare_image(Image.new("RGB", size, (10, 20, 30)), CLIP)
    assert rows.shape == (224, 224, 3)
    assert (rows == (10, 20, 30)).all()


def test_fitted_sizes_are_the_library_s():
    random = np.random.default_rng(0)
    rule = ImageRule(resize=(800, 800), keep_aspect=True, longest=1333)
    for height, width in random.integers(50, 4000, (2000, 2)).tolist():
        assert fitted_size(height, width, rule) == get_size_with_aspect_ratio((height, width), 800, 1333)
    for size in ((800, 900), (900, 800), (800, 800), (1333, 800), (1, 1), (1333, 1)):
        assert fitted_size(*size, rule) == get_size_with_aspect_ratio(size, 800, 1333)


def test_a_fitted_side_has_at_least_a_pixel():
    assert prepare_image(Image.new("RGB", (4000, 2)), FITTED).shape == (1, 150, 3)
    assert prepare_image(Image.new("RGB", (2, 4000)), FITTED).shape == (150, 1, 3)


def test_an_image_that_the_worker_resizes_stays_unless_it_is_far_larger():
    rule = ImageRule(square=16)
    rows = noise(128, 50)
    assert np.array_equal(prepare_image(Image.fromarray(rows), rule), rows)
    assert prepare_image(Image.fromarray(noise(129, 50)), rule).shape == (128, 50, 3)
    assert prepare_image(Image.new("RGB", (2_000_000, 1)), rule).shape == (1, 128, 3)
    grey = prepare_image(Image.new("RGB", (500, 900), (10, 20, 30)), rule)
    assert (grey == (10, 20, 30)).all()


def test_without_a_size_an_image_is_what_it_is():
    rows = noise(33, 77)
    assert np.array_equal(prepare_image(Image.fromarray(rows), ImageRule()), rows)
