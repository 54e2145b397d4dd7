"""Decides which inputs of tensor models have the shape of a batch of images, and which axis is which. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from sie.values.tensor import TensorSpec

_CHANNELS: Final = (3, 1, 4)
"""Sizes that are probably the number of channels, the most likely first."""
_NOT_PIXELS: Final = frozenset(("BYTES", "BOOL"))
IMAGE_RANK: Final = 4


class ImageForm(NamedTuple):
    """The form of an input's images; -1 means any size."""

    is_channels_last: bool
    height: int
    width: int
    channels: int


def image_form(spec: TensorSpec) -> ImageForm | None:
    """Return the form of an input's images, or None if it takes none.

    An image input has four dimensions, first the number of images. `input.format` of its configuration says where the
    channels are. Otherwise they are the second or the last axis: the only one of size 3, or else 1, or else 4.
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
