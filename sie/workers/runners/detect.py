"""Provides the parts that detector runners share: pixel preparation, cached queries, and grouping of images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.values.card import ImageRule
from sie.values.errors import BadRequest
from sie.workers.model_api import SearchedImage

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """A least-recently-used cache with a limited number of values."""

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return a value, or None if it is not cached."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Key, value: Value) -> None:
        """Cache a value, and evict the least recently used one if the cache is full."""
        self._values[key] = value
        if len(self._values) > self._max_values:
            self._values.popitem(last=False)


class PixelScale:
    """Rescales and normalises pixel values by an image rule."""

    def __init__(self, rule: ImageRule, device: torch.device) -> None:
        self._factor = rule.rescale_factor
        self._mean = torch.tensor(rule.mean, device=device).reshape(3, 1, 1)
        self._std = torch.tensor(rule.std, device=device).reshape(3, 1, 1)

    def __call__(self, values: Tensor) -> Tensor:
        """Return (n, 3, h, w) float32 from values 0 to 255 of the same shape, in place."""
        return values.mul_(self._factor).sub_(self._mean).div_(self._std)


def stack_pixels(images: Sequence[NDArray[np.uint8]], device: torch.device) -> Tensor:
    """Return images (h, w, 3) of one size as (n, 3, h, w) float32 on the device; values stay 0 to 255."""
    on_host = torch.empty((len(images), *images[0].shape), dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.stack(images, out=on_host.numpy())
    return on_host.to(device, non_blocking=True).permute(0, 3, 1, 2).float()


def group_images(
    images: Sequence[SearchedImage], key_of: Callable[[SearchedImage], Hashable]
) -> dict[Hashable, list[int]]:
    """Return the indices of the images by their key."""
    groups: dict[Hashable, list[int]] = {}
    for number, image in enumerate(images):
        groups.setdefault(key_of(image), []).append(number)
    return groups


def check_queries(queries: Sequence[NDArray[np.int32]], vocab_size: int) -> None:
    """Raise BadRequest for a token id outside the vocabulary: on a GPU it would end the process."""
    if any(int(ids.min()) < 0 or int(ids.max()) >= vocab_size for ids in queries):
        raise BadRequest(f"A token id is not in the vocabulary of {vocab_size}")


def over_threshold(columns: Tensor, threshold: float) -> NDArray[np.float32]:
    """Return the rows of (b, 5 + k) whose first column, the score, is over the threshold. Copies to the host.

    NaN scores stay too, so that they are detected and do not look like an image without objects.
    """
    return columns[~(columns[:, 0] <= threshold)].float().cpu().numpy()
