"""Encoded images as inputs of tensor models: files in, the model's own tensors out, and what is refused."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sie.config.limits import Limits
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.tensors.encoded_images import TensorImages
from sie.frontend.tensors.image_inputs import ImageForm, image_form
from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest, DeadlineExceeded, Overloaded, SieError
from sie.values.tensor import DATATYPES, Tensor, TensorRequest, TensorRule, TensorSpec

FAR_NS = 1 << 62
RNG = np.random.default_rng(5)


def spec_of(shape: tuple[int, ...], datatype: str = "UINT8", layout: Any = "") -> TensorSpec:
    return TensorSpec(name="x", datatype=datatype, shape=shape, format=layout)


def rule_of(spec: TensorSpec, **fields: Any) -> TensorRule:
    return TensorRule(name="m", version="1", platform="", inputs=(spec,), outputs=(), max_batch_size=8, **fields)


def pixels(height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
    found = RNG.integers(0, 256, (height, width, channels), np.uint8)
    return found[..., 0] if channels == 1 else found


def encode(values: NDArray[np.uint8], form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, form, **options)
    return file.getvalue()


def decode(
    rule: TensorRule,
    files: list[bytes],
    *,
    shape: tuple[int, ...] | None = None,
    deadline_ns: int = FAR_NS,
    **limits: Any,
) -> NDArray[Any]:
    """Return the array that the files become."""

    async def run() -> Tensor:
        own = Limits(**limits)
        images = ImageReader(own, 2)
        data = memoryview(frame_elements(files))
        request = TensorRequest(model="m", inputs=[Tensor("x", "BYTES", shape or (len(files),), data)])
        try:
            found = await TensorImages(images, lambda: own).decoded(rule, request, deadline_ns)
            return found.inputs[0]
        finally:
            images.close()

    found = asyncio.run(run())
    assert found.datatype == rule.inputs[0].datatype
    return np.frombuffer(found.data, DATATYPES[found.datatype]).reshape(found.shape)


def bilinear(values: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float64]:
    """Resize as OpenCV's INTER_LINEAR: the four pixels around each point's centre, edges repeated."""

    def weights(size: int, own: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        at = (np.arange(size) + 0.5) * own / size - 0.5
        low = np.floor(at).astype(int)
        return np.clip(low, 0, own - 1), np.clip(low + 1, 0, own - 1), at - low

    top, bottom, y = weights(height, values.shape[0])
    left, right, x = weights(width, values.shape[1])
    rows = values[top] * (1 - y)[:, None, None] + values[bottom] * y[:, None, None]
    return rows[:, left] * (1 - x)[None, :, None] + rows[:, right] * x[None, :, None]


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((-1, 8, 6, 3), "", ImageForm(True, 8, 6, 3)),
        ((-1, 3, 8, 6), "", ImageForm(False, 8, 6, 3)),
        ((1, -1, -1, 1), "", ImageForm(True, -1, -1, 1)),
        ((-1, -1, -1, -1), "NCHW", ImageForm(False, -1, -1, -1)),
        ((-1, 4, 4, 3), "", ImageForm(True, 4, 4, 3)),
        ((1, 1, 1, 3), "", ImageForm(True, 1, 1, 3)),
        ((-1, 1, 8, 4), "", ImageForm(False, 8, 4, 1)),
        ((-1, 3, 8, 3), "NHWC", ImageForm(True, 3, 8, 3)),
        ((-1, 3, 8, 3), "", None),
        ((-1, 8, 8, 16), "", None),
        ((-1, -1, -1, -1), "", None),
        ((8, 6, 3), "NHWC", None),
    ],
)
def test_an_input_shows_how_it_takes_images(shape: tuple[int, ...], layout: Any, expected: ImageForm | None):
    assert image_form(spec_of(shape, "FP32", layout)) == expected


def test_bytes_and_booleans_are_no_pixels():
    assert image_form(spec_of((-1, 8, 6, 3), "BYTES")) is None
    assert image_form(spec_of((-1, 8, 6, 3), "BOOL")) is None


@pytest.mark.parametrize("datatype", ["UINT8", "INT32", "INT64", "FP16", "FP32", "FP64"])
def test_pixels_come_as_they_are_in_bgr(datatype: str):
    values = [pixels(8, 6) for _ in range(3)]
    found = decode(rule_of(spec_of((-1, 8, 6, 3), datatype)), [encode(one) for one in values])
    np.testing.assert_array_equal(found, np.stack(values)[..., ::-1])


def test_the_layout_and_the_order_of_colours_are_the_models():
    values = pixels(8, 6)
    found = decode(rule_of(spec_of((-1, 3, 8, 6), "FP32"), image_colors="RGB"), [encode(values)])
    np.testing.assert_array_equal(found, np.moveaxis(values, 2, 0)[None])


def test_bf16_has_each_value_exactly_and_int8_ends_at_its_limit():
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    bits = decode(rule_of(spec_of((-1, 16, 16, 1), "BF16")), [encode(values)])
    np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32)[0, ..., 0], values)
    small = decode(rule_of(spec_of((-1, 16, 16, 1), "INT8")), [encode(values)])
    np.testing.assert_array_equal(small[0, ..., 0], np.minimum(values, 127))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(20, 30), (5, 4)])
def test_images_are_resized_as_opencv_does(size: tuple[int, int], channels: int):
    values = pixels(11, 13, channels)
    found = decode(rule_of(spec_of((-1, *size, channels)), image_colors="RGB"), [encode(values)])
    expected = bilinear(values.reshape(11, 13, -1).astype(float), *size)
    assert np.abs(found[0] - expected).max() <= 1.0 + 1e-9


def test_a_size_that_the_model_leaves_open_is_the_images_own():
    values = [pixels(7, 9) for _ in range(2)]
    found = decode(rule_of(spec_of((-1, -1, -1, 3))), [encode(one) for one in values])
    np.testing.assert_array_equal(found, np.stack(values)[..., ::-1])
    with pytest.raises(BadRequest, match="same size") as caught:
        decode(rule_of(spec_of((-1, -1, -1, 3))), [encode(pixels(7, 9)), encode(pixels(9, 7))])
    assert "inputs[name=x].data[1]" in caught.value.message


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "BMP", "TIFF"])
def test_every_format_is_read(form: str):
    flat = np.full((8, 6, 3), (200, 100, 50), np.uint8)
    found = decode(rule_of(spec_of((-1, 8, 6, 3), "FP32")), [encode(flat, form)])
    np.testing.assert_allclose(found, np.broadcast_to([50, 100, 200], (1, 8, 6, 3)), atol=6)


@pytest.mark.parametrize(
    ("form", "options"), [("JPEG", {}), ("PNG", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})]
)
@pytest.mark.parametrize("orientation", [3, 6])
def test_what_a_camera_says_of_its_position_changes_nothing(form: str, options: dict[str, Any], orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    values = np.zeros((32, 16, 3), np.uint8)
    values[:16] = 200  # the upper half
    found = decode(rule_of(spec_of((-1, -1, -1, 3))), [encode(values, form, exif=exif, **options)])
    assert found.shape == (1, 32, 16, 3)
    np.testing.assert_allclose(found[0].astype(int), values, atol=6)


@pytest.mark.parametrize(
    ("files", "shape", "limits", "message"),
    [
        ([b"no image"], None, {}, "not a decodable image - at `inputs[name=x].data[0]`"),
        ([b""], None, {}, "not a decodable image"),
        ([encode(pixels(8, 6))[:-30]], None, {}, "not a decodable image"),
        ([encode(pixels(8, 6)), b"\x89PNG"], None, {}, "data[1]"),
        ([encode(pixels(8, 6, 1))], None, {}, "image has 1 channels, and input 'x' takes 3"),
        ([encode(pixels(8, 6, 4))], None, {}, "image has 4 channels, and input 'x' takes 3"),
        ([encode(pixels(8, 6))], (1, 1), {}, "Expected [-1], got [1, 1]"),
        ([encode(pixels(8, 6))], (2,), {}, "expected 2 string elements"),
        ([encode(pixels(8, 6))] * 2, (1,), {}, "got 2"),
        ([encode(pixels(8, 6))], (0,), {}, "at least 1"),
        ([encode(pixels(8, 6))] * 3, None, {"max_images": 2}, "max_images (2)"),
        ([encode(pixels(8, 6))], None, {"max_image_bytes": 100}, "max_image_bytes"),
        ([encode(pixels(40, 60))], None, {"max_image_pixels": 1000}, "max_image_pixels"),
        ([encode(pixels(20, 30))] * 8, None, {"max_body_bytes": 1024}, "max_body_bytes"),
    ],
)
def test_what_is_no_such_image_is_refused_by_name(
    files: list[bytes], shape: tuple[int, ...] | None, limits: dict[str, int], message: str
):
    with pytest.raises(BadRequest) as caught:
        decode(rule_of(spec_of((-1, 8, 6, 3))), files, shape=shape, **limits)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("deadline_ns", "limits", "error"),
    [(0, {}, DeadlineExceeded), (FAR_NS, {"max_queued_images": 1}, Overloaded)],
)
def test_too_late_and_too_many_are_told_as_such(deadline_ns: int, limits: dict[str, int], error: type[SieError]):
    with pytest.raises(error):
        decode(rule_of(spec_of((-1, 8, 6, 3))), [encode(pixels(8, 6))] * 2, deadline_ns=deadline_ns, **limits)


@pytest.mark.parametrize(
    ("shape", "datatype"), [((-1, -1, -1, -1), "FP32"), ((-1, 3, 8, 3), "FP32"), ((-1, 8, 6, 3), "BOOL")]
)
def test_a_shape_that_does_not_tell_its_channels_is_named(shape: tuple[int, ...], datatype: str):
    with pytest.raises(BadRequest, match=r"input\.format of its configuration"):
        decode(rule_of(spec_of(shape, datatype)), [encode(pixels(8, 6))])


def test_strings_of_other_models_are_left_alone():
    spec = TensorSpec(name="x", datatype="BYTES", shape=(-1,))
    request = TensorRequest(model="m", inputs=[Tensor("x", "BYTES", (1,), memoryview(frame_elements([b"text"])))])
    images = TensorImages(ImageReader(Limits(), 1), Limits)
    assert asyncio.run(images.decoded(rule_of(spec), request, FAR_NS)).inputs == request.inputs
