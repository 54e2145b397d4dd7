"""Accepts encoded images as inputs of tensor models: decides which inputs take them, and makes the tensors.

An input with the shape of an image also accepts BYTES of shape [n], beside its own datatype. Each of the n files is
decoded, resized to the model's height and width, and cast. Colours are BGR unless the model's configuration says
otherwise. Values are 0 to 255. Decoding is slow, so threads do it.
Source: OpenVINO Model Server, binary encoded image input; KServe v2 sheet, section 6.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sie.config.limits import Limits
from sie.frontend.inputs.image_reader import ImageReader
from sie.frontend.inputs.images import keep_position, open_image
from sie.frontend.tensors.checks import check_data
from sie.frontend.tensors.image_inputs import IMAGE_RANK, ImageForm, image_form
from sie.values.bytes_tensor import element_bounds
from sie.values.errors import BadRequest, DeadlineExceeded, SieError, untied
from sie.values.tensor import DATATYPES, ITEM_BYTES, Tensor, TensorRequest, TensorRule, TensorSpec

_CHANNELS: Final = {"L": 1, "RGB": 3, "RGBA": 4}
_MODES: Final = {"1": "L", "P": "RGB", "PA": "RGBA", "LA": "RGBA", "La": "RGBA", "RGBa": "RGBA", "RGBX": "RGB"}
"""The mode to which an image of a Pillow mode is converted. Modes that are neither here nor in _CHANNELS become RGB."""


class TensorImages:
    """Turns the encoded images of tensor requests into tensors, on the image threads."""

    def __init__(self, images: ImageReader, limits: Callable[[], Limits]) -> None:
        """Limits returns the present limits."""
        self._images = images
        self._limits = limits

    async def decoded(self, rule: TensorRule, request: TensorRequest, deadline_ns: int) -> TensorRequest:
        """Return the request with tensors instead of encoded images, or the same request if it has none.

        Raises BadRequest for data that is not an image for this model, Overloaded if too many wait, DeadlineExceeded.
        """
        if not any(tensor.datatype == "BYTES" for tensor in request.inputs):
            return request
        specs = {spec.name: spec for spec in rule.inputs if spec.datatype != "BYTES"}
        inputs = list(request.inputs)
        for index, tensor in enumerate(inputs):
            spec = specs.get(tensor.name) if tensor.datatype == "BYTES" else None
            form = image_form(spec) if spec is not None else None
            if spec is not None and form is None and len(spec.shape) == IMAGE_RANK:
                raise BadRequest(
                    f"input '{spec.name}' of model '{rule.name}' takes no encoded images: neither its shape nor "
                    "input.format of its configuration says where the channels are"
                )
            if spec is not None and form is not None:
                inputs[index] = await self._decode(rule, spec, form, tensor, deadline_ns)
        return msgspec.structs.replace(request, inputs=inputs)

    async def _decode(
        self, rule: TensorRule, spec: TensorSpec, form: ImageForm, tensor: Tensor, deadline_ns: int
    ) -> Tensor:
        limits = self._limits()
        files = _files(rule, tensor, limits)
        batch = _Batch(spec, form, rule.image_colors, limits, deadline_ns)
        (failure,) = await self._images.run([partial(batch.open, files)])
        if failure is None:
            failures = await self._images.run([partial(batch.decode, index) for index in range(len(files))])
            failure = next((found for found in failures if found is not None), None)
        if failure is not None:
            raise untied(failure)
        return Tensor(spec.name, spec.datatype, batch.pixels.shape, batch.data())


def _files(rule: TensorRule, tensor: Tensor, limits: Limits) -> list[memoryview]:
    """Return the encoded images of an input. Raises BadRequest."""
    if len(tensor.shape) != 1:
        raise BadRequest(
            f"unexpected shape for encoded images of input '{tensor.name}' for model '{rule.name}'. Expected [-1], got "
            f"{list(tensor.shape)[:32]}"
        )
    if not 1 <= tensor.shape[0] <= limits.max_images:
        raise BadRequest(
            f"input '{tensor.name}' has {tensor.shape[0]} encoded images; at least 1 and at most max_images "
            f"({limits.max_images}) are taken"
        )
    check_data(rule.name, tensor, limits.max_images)
    files = [tensor.data[start:end] for start, end in element_bounds(tensor.data)]
    for index, file in enumerate(files):
        if len(file) > limits.max_image_bytes:
            raise BadRequest(
                f"image has {len(file)} bytes, over max_image_bytes ({limits.max_image_bytes}) - at "
                f"`{_path(tensor.name, index)}`"
            )
    return files


def _path(name: str, index: int) -> str:
    return f"inputs[name={name}].data[{index}]"


class _Opened(NamedTuple):
    """An image whose header alone was read, and the mode to decode it in."""

    image: Image.Image
    mode: str


class _Batch:
    """The images of one input while they are decoded. `open` runs first; then `decode` runs on several threads."""

    def __init__(self, spec: TensorSpec, form: ImageForm, colors: str, limits: Limits, deadline_ns: int) -> None:
        self._spec = spec
        self._form = form
        self._is_bgr = colors == "BGR"
        self._limits = limits
        self._deadline_ns = deadline_ns
        self._opened: list[_Opened] = []
        self._has_failed = False
        self.pixels: NDArray[Any] = np.empty(0, np.uint8)
        """Pixels in the model's layout and type; for BF16, its bits."""

    def open(self, files: Sequence[memoryview]) -> SieError | None:
        """Read all headers and allocate the pixels. Return the error, or None."""
        try:
            self._open(files)
        except SieError as error:
            return untied(error)
        return None

    def _open(self, files: Sequence[memoryview]) -> None:
        spec, form = self._spec, self._form
        for index, file in enumerate(files):
            path = _path(spec.name, index)
            image = open_image(file, path, self._limits.max_image_pixels)
            keep_position(image)
            mode = _mode_of(image)
            if form.channels not in (-1, _CHANNELS[mode]):
                raise BadRequest(
                    f"image has {_CHANNELS[mode]} channels, and input '{spec.name}' takes {form.channels} - at `{path}`"
                )
            self._opened.append(_Opened(image, mode))
        first, mode = self._opened[0]
        height = first.height if form.height < 0 else form.height
        width = first.width if form.width < 0 else form.width
        for index, (image, other) in enumerate(self._opened):
            has_own_size = form.height < 0 or form.width < 0
            if (has_own_size and image.size != first.size) or other != mode:
                raise BadRequest(
                    "images of one request must have the same size and channels where the model leaves them open - at "
                    f"`{_path(spec.name, index)}`"
                )
        channels = _CHANNELS[mode]
        count = len(files)
        nbytes = count * height * width * channels * ITEM_BYTES[spec.datatype]
        if nbytes > self._limits.max_body_bytes:
            raise BadRequest(
                f"the decoded images of input '{spec.name}' have {nbytes} bytes, over max_body_bytes "
                f"({self._limits.max_body_bytes}); split the request"
            )
        shape = (count, height, width, channels) if form.is_channels_last else (count, channels, height, width)
        self.pixels = np.empty(shape, DATATYPES[spec.datatype])

    def decode(self, index: int) -> SieError | None:
        """Decode one image to its place. Return the error, or None. Does nothing after another image has failed."""
        if self._has_failed:
            return None
        try:
            self._decode(index)
        except SieError as error:
            self._has_failed = True
            return untied(error)
        return None

    def _decode(self, index: int) -> None:
        if time.monotonic_ns() > self._deadline_ns:
            raise DeadlineExceeded("the request's deadline passed before its images were decoded")
        opened = self._opened[index]
        size = (self._form.width, self._form.height)
        try:
            image = _as_mode(opened.image, opened.mode)
            rows = np.asarray(_resized(image, size))
        except Exception:  # decoders raise different exceptions for damaged data
            raise BadRequest(f"image data is not a decodable image - at `{_path(self._spec.name, index)}`") from None
        rows = rows.reshape(*rows.shape[:2], -1)
        if self._is_bgr and rows.shape[2] >= 3:
            rows = rows[..., [2, 1, 0, *range(3, rows.shape[2])]]
        own = rows if self._form.is_channels_last else np.moveaxis(rows, 2, 0)
        if self._spec.datatype == "BF16":  # a float from 0 to 255 needs only its upper 16 bits
            self.pixels[index] = own.astype(np.float32).view(np.uint32) >> 16
        elif self._spec.datatype == "INT8":
            self.pixels[index] = np.minimum(own, 127)
        else:
            self.pixels[index] = own

    def data(self) -> memoryview:
        """Return the tensor's bytes."""
        return self.pixels.reshape(-1).view(np.uint8).data


def _mode_of(image: Image.Image) -> str:
    """Return the mode to decode an image in: one channel, three, or four with transparency."""
    if image.mode.startswith("I;16"):
        return "L"
    if image.mode == "P" and "transparency" in image.info:
        return "RGBA"
    mode = _MODES.get(image.mode, image.mode)
    return mode if mode in _CHANNELS else "RGB"


def _as_mode(image: Image.Image, mode: str) -> Image.Image:
    image.load()
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return an image resized to (width, height), bilinear; a negative size keeps the image's own.

    The filter reads only the pixels around each point, and does not average when it makes an image smaller. So models
    see the same pixels as in OpenVINO Model Server. An image with transparency is resized one channel at a time, because
    transparency must not weight the colours.
    """
    width, height = (own if wanted < 0 else wanted for wanted, own in zip(size, image.size, strict=True))
    if (width, height) == image.size:
        return image
    scale = (image.width / width, 0.0, 0.0, 0.0, image.height / height, 0.0)
    if image.mode == "RGBA":
        return Image.merge("RGBA", [_resized(band, size) for band in image.split()])
    return image.transform((width, height), Image.Transform.AFFINE, scale, Image.Resampling.BILINEAR)
