"""Takes encoded images as inputs of tensor models: decides which inputs take them, and makes the tensors.

An input with the shape of an image takes, beside its own datatype, BYTES of shape [n]: n files, each decoded, resized to
the model's height and width, and cast. Colours are BGR unless the model's configuration says otherwise; values 0 to 255.
Source: OpenVINO Model Server, binary encoded image input; KServe v2 sheet, section 6. Slow, so done on threads.
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
from sie.frontend.inputs.images import open_image
from sie.frontend.tensors.checks import check_data
from sie.frontend.tensors.image_inputs import IMAGE_RANK, ImageForm, image_form
from sie.values.bytes_tensor import element_bounds
from sie.values.errors import BadRequest, DeadlineExceeded, SieError
from sie.values.tensor import DATATYPES, ITEM_BYTES, Tensor, TensorRequest, TensorRule, TensorSpec

_CHANNELS: Final = {"L": 1, "RGB": 3, "RGBA": 4}
_MODES: Final = {"1": "L", "P": "RGB", "PA": "RGBA", "LA": "RGBA", "La": "RGBA", "RGBa": "RGBA", "RGBX": "RGB"}
"""What a mode of Pillow's is read as; one that is neither here nor in _CHANNELS has three colours of another kind."""


class TensorImages:
    """Turns the encoded images of tensor requests into tensors, on the threads that read images."""

    def __init__(self, images: ImageReader, limits: Callable[[], Limits]) -> None:
        """Limits returns those in force."""
        self._images = images
        self._limits = limits

    async def decoded(self, rule: TensorRule, request: TensorRequest, deadline_ns: int) -> TensorRequest:
        """Return the request with tensors in place of encoded images; the same one where it has none.

        Raises BadRequest for what is no image of the model's kind, Overloaded when too many wait, DeadlineExceeded.
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
            raise failure
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
    """An image of which only the header was read, and how it is to be read."""

    image: Image.Image
    mode: str


class _Batch:
    """The images of one input on their way. `open` comes first; then `decode` runs on several threads."""

    def __init__(self, spec: TensorSpec, form: ImageForm, colors: str, limits: Limits, deadline_ns: int) -> None:
        self._spec = spec
        self._form = form
        self._is_bgr = colors == "BGR"
        self._limits = limits
        self._deadline_ns = deadline_ns
        self._opened: list[_Opened] = []
        self._has_failed = False
        self.pixels: NDArray[Any] = np.empty(0, np.uint8)
        """In the model's layout and type; BF16 its bits."""

    def open(self, files: Sequence[memoryview]) -> SieError | None:
        """Read all headers and make room; return what is wrong."""
        try:
            self._open(files)
        except SieError as error:
            return error
        return None

    def _open(self, files: Sequence[memoryview]) -> None:
        spec, form = self._spec, self._form
        for index, file in enumerate(files):
            path = _path(spec.name, index)
            image = open_image(file, path, self._limits.max_image_pixels)
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
        """Write one image to its place; return what is wrong. Does nothing once another one was wrong."""
        if self._has_failed:
            return None
        try:
            self._decode(index)
        except SieError as error:
            self._has_failed = True
            return error
        return None

    def _decode(self, index: int) -> None:
        if time.monotonic_ns() > self._deadline_ns:
            raise DeadlineExceeded("the request's deadline passed before its images were decoded")
        opened = self._opened[index]
        size = (self._form.width, self._form.height)
        try:
            image = _as_mode(opened.image, opened.mode)
            rows = np.asarray(_resized(image, size))
        except Exception:  # each decoder fails in its own way on damaged data
            raise BadRequest(f"image data is not a decodable image - at `{_path(self._spec.name, index)}`") from None
        rows = rows.reshape(*rows.shape[:2], -1)
        if self._is_bgr and rows.shape[2] >= 3:
            rows = rows[..., [2, 1, 0, *range(3, rows.shape[2])]]
        own = rows if self._form.is_channels_last else np.moveaxis(rows, 2, 0)
        if self._spec.datatype == "BF16":  # a float of 0 to 255 has its value in its upper half alone
            self.pixels[index] = own.astype(np.float32).view(np.uint32) >> 16
        elif self._spec.datatype == "INT8":
            self.pixels[index] = np.minimum(own, 127)
        else:
            self.pixels[index] = own

    def data(self) -> memoryview:
        """Return the tensor's bytes."""
        return self.pixels.reshape(-1).view(np.uint8).data


def _mode_of(image: Image.Image) -> str:
    """Return the mode that an image is read as: one channel, three, or four with its transparency."""
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
    """Return an image of (width, height), negative: its own; bilinear between the pixels around each point, no more.

    So that models see what OpenVINO Model Server shows them, whose filter takes no average where an image is made
    smaller. A channel at a time where there is transparency, which must not weigh the colours.
    """
    width, height = (own if wanted < 0 else wanted for wanted, own in zip(size, image.size, strict=True))
    if (width, height) == image.size:
        return image
    scale = (image.width / width, 0.0, 0.0, 0.0, image.height / height, 0.0)
    if image.mode == "RGBA":
        return Image.merge("RGBA", [_resized(band, size) for band in image.split()])
    return image.transform((width, height), Image.Transform.AFFINE, scale, Image.Resampling.BILINEAR)
