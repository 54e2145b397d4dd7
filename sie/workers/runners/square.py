"""Prepares an image for OWLv2 on the device: pads it below and to the right to a square, blurs it and resizes it.

All operations are linear and treat rows and columns alike. So each row of the result is a weighted sum of a few rows of
the image. Columns are then computed in the same way. Values stay within the image's range. The library's clipping
only undoes rounding, so it is omitted here.
Source: transformers 5.23 image_processing_pil_owlv2.py (pad, resize), scipy 1.17 ndimage gaussian_filter1d and zoom.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

_TRUNCATE = 4.0
"""Standard deviations at which scipy truncates its kernel."""


def to_square(image: NDArray[np.uint8], side: int, device: torch.device) -> Tensor:
    """Return (3, side, side) float32 of an image (h, w, 3); values keep the image's range, 0 to 255."""
    height, width, channels = image.shape
    longest = max(height, width)
    # torch.tensor copies: torch would warn about the image, which is a read-only view.
    rows = torch.tensor(image.reshape(height, width * channels)).to(device).float()
    rows = _weighted(rows, longest, height, side)
    columns = rows.reshape(side, width, channels).permute(1, 0, 2).reshape(width, side * channels)
    columns = _weighted(columns, longest, width, side)
    return columns.reshape(side, side, channels).permute(2, 1, 0)


def _weighted(rows: Tensor, longest: int, count: int, side: int) -> Tensor:
    """Return the rows of the result (side, x), computed from the image's rows (count, x)."""
    places, weights = (torch.from_numpy(array).to(rows.device) for array in taps(longest, count, side))
    return embedding_bag(places, rows, per_sample_weights=weights, mode="sum")


@lru_cache(maxsize=256)
def taps(longest: int, count: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return (places, weights), both (side, k): the rows, of `longest`, that make each row of the result.

    Rows from `count` on are zero padding and get the weight 0.
    """
    positions = (np.arange(side) + 0.5) * (longest / side) - 0.5
    lower = np.floor(positions)
    part = (positions - lower)[:, None]
    kernel = _kernel(max(0.0, (longest / side - 1) / 2))
    radius = len(kernel) // 2
    # Both neighbours of a position are blurred: their kernels lie one row apart.
    weights = np.pad(kernel, (0, 1)) * (1 - part) + np.pad(kernel, (1, 0)) * part
    places = _mirrored(lower.astype(np.int64)[:, None] + np.arange(-radius, radius + 2), longest)
    inside = places < count
    return np.where(inside, places, 0), np.where(inside, weights, 0.0).astype(np.float32)


def _kernel(sigma: float) -> NDArray[np.float64]:
    """Return the weights of a Gaussian, symmetric about the middle."""
    radius = int(_TRUNCATE * sigma + 0.5)
    if not radius:
        return np.ones(1)
    offsets = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 / (sigma * sigma) * offsets**2)
    return weights / weights.sum()


def _mirrored(places: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return places within a row of `length`; places beyond an end are mirrored at the centre of its last element."""
    if length == 1:
        return np.zeros_like(places)
    places = np.abs(places) % (2 * (length - 1))
    return np.minimum(places, 2 * (length - 1) - places)
