"""Decides which inputs of tensor models have the shape of a batch of images, and which axis is which. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from sie.values.tensor import TensorSpec

_CHANNELS: Final = (3, 1, 4)
"""What a size that is one of these is taken for, the likeliest first."""
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

    It has four dimensions, the images' number first. Its configuration says where the channels are (`input.format`);
    without that they are in the one place that has 3, else 1, else 4.
    """
    if len(spec.shape) != IMAGE_RANK or spec.datatype in _NOT_PIXELS:
        return None
    _, second, third, last = spec.shape
    layout = spec.format or _layout_of(second, last)
    if layout == "NHWC":
        return ImageForm(True, second, third, last)
    if layout == "NCHW":
        return ImageForm(False, third, last, second)
    return None


def _layout_of(second: int, last: int) -> str:
    for channels in _CHANNELS:
        if channels in (second, last):
            return "" if second == last else "NHWC" if last == channels else "NCHW"
    return ""
