"""Finds the tokens that would repeat an n-gram of a text (`no_repeat_ngram_size`)."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray


def followers(ids: NDArray[np.int32], size: int) -> list[int]:
    """Return the tokens that would complete an n-gram of this size that is in ids (t,) already; none for size 0."""
    if not 0 < size <= len(ids):
        return []
    begun = ids[len(ids) - size + 1 :]
    places = np.flatnonzero((sliding_window_view(ids, size)[:, :-1] == begun).all(1))
    return np.unique(ids[places + size - 1]).tolist()
