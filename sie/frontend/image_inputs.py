"""Decides which inputs of tensor models have the shape of a batch of images, and which axis is which. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from sie.tensors import TensorSpec

_CHANNELS: Final = frozenset((1, 3, 4))
_NOT_PIXELS: Final = frozenset(("BYTES", "BOOL"))
IMAGE_RANK: Final = 4


class ImageForm(NamedTuple):
    """What images of an input look like; -1: any size."""

    is_channels_last: bool
    height: int
    width: int
    channels: int


def image_form(spec: TensorSpec) -> ImageForm | None:
    """Return how an input takes images, None for one that does not.

    It has four dimensions, the images' number first; its configuration says where the channels are (`input.format`), or
    just one of both places has a size that channels have: 1, 3 or 4.
    """
    if len(spec.shape) != IMAGE_RANK or spec.datatype in _NOT_PIXELS:
        return None
    _, second, third, last = spec.shape
    layout = spec.format
    if not layout and (second in _CHANNELS) != (last in _CHANNELS):
        layout = "NHWC" if last in _CHANNELS else "NCHW"
    if layout == "NHWC":
        return ImageForm(True, second, third, last)
    if layout == "NCHW":
        return ImageForm(False, third, last, second)
    return None
