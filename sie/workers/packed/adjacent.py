"""Holds the items of a step that lie back to back in memory, for models that pack them with one copy. Pure NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


class AdjacentItems(Sequence[NDArray[Any]]):
    """Items (t_i,), token ids or UTF-8 bytes, that lie back to back in a few arrays.

    Each item is a view. All are made when the first one is asked for; a runner that packs them needs none.
    """

    __slots__ = ("_views", "lengths", "pieces")

    def __init__(self, pieces: list[NDArray[Any]], lengths: list[int]) -> None:
        """Each piece has one or more whole items, in order."""
        self.pieces = pieces
        self.lengths = lengths
        self._views: list[NDArray[Any]] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if self._views is None:
            self._views = list(self._split())
        return self._views[index]

    def joined(self) -> NDArray[Any]:
        """Return all items back to back: the piece itself if there is one, else a copy."""
        return self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)

    def part(self, first: int, end: int) -> AdjacentItems:
        """Return the items from first to end of a single piece."""
        start = sum(self.lengths[:first])
        lengths = self.lengths[first:end]
        return AdjacentItems([self.pieces[0][start : start + sum(lengths)]], lengths)

    def _split(self) -> Iterator[NDArray[Any]]:
        pieces = iter(self.pieces)
        piece, start = next(pieces), 0
        for length in self.lengths:
            while start + length > len(piece):
                piece, start = next(pieces), 0
            yield piece[start : start + length]
            start += length


def lengths_of(items: Sequence[NDArray[Any]]) -> list[int]:
    """Return the length of each item (t_i,)."""
    return items.lengths if isinstance(items, AdjacentItems) else [len(item) for item in items]
