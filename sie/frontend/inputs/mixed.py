"""Builds the arrays of a request in which some items are images. Pure. Layout: `sie.values.work.WorkHeader`."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.frontend.inputs.image_reader import ReadImages
from sie.frontend.inputs.tokenize import bounds_of
from sie.values.card import ImageRule

Arrays = list[tuple[str, NDArray[Any]]]


def mix_items(num_items: int, read: ReadImages, rule: ImageRule, texts: Arrays | None) -> Arrays:
    """Return the arrays of a request's extent, the items' bounds first.

    texts holds the arrays of only the text items: `cu_seqlens` and `token_ids`, or `cu_seqlens`, `text` and
    `text_offsets`. It is None when there are no text items.
    """
    counts = np.zeros(num_items, np.int64)
    counts[list(read.counts)] = list(read.counts.values())
    costs = np.zeros(num_items, np.int64)
    each = iter([rule.count_tokens(height, width) for height, width in read.sizes.tolist()])
    costs[list(read.counts)] = [sum(islice(each, count)) for count in read.counts.values()]
    arrays: Arrays = [("pixels", read.pixels), ("image_sizes", read.sizes), ("image_offsets", _bounds(counts))]
    if texts is not None:
        is_text = counts == 0
        named = dict(texts)
        lengths = _spread(named["cu_seqlens"], is_text)
        costs += lengths
        if "token_ids" in named:
            arrays += [("token_ids", named["token_ids"]), ("token_offsets", _bounds(lengths))]
        else:
            arrays += [("text", named["text"]), ("text_offsets", _bounds(_spread(named["text_offsets"], is_text)))]
    return [("cu_seqlens", _bounds(costs)), *arrays]


def _spread(bounds: NDArray[np.int32], is_text: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return (n,) lengths for all items from the bounds of the text items; other items have length 0."""
    lengths = np.zeros(len(is_text), np.int64)
    lengths[is_text] = np.diff(bounds)
    return lengths


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return bounds_of(lengths.tolist(), len(lengths))
