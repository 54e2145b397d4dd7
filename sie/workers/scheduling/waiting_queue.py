"""Holds the waiting items of one model, and tells those apart that wait together. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.workers.scheduling.waiting import WaitingItem


class WaitingQueue:
    """The waiting items of one model in order of arrival. Its length is their number, where several together count each."""

    __slots__ = ("_items", "_num_items")

    def __init__(self, items: Sequence[WaitingItem] = ()) -> None:
        self._items = deque(items)
        self._num_items = count_items(items) if items else 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[WaitingItem]:
        return iter(self._items)

    @property
    def head(self) -> WaitingItem:
        """The oldest item."""
        return self._items[0]

    def append(self, item: WaitingItem) -> None:
        """Add an item at the end."""
        self._items.append(item)
        self._num_items += item.num_items

    def put_back(self, items: list[WaitingItem]) -> None:
        """Add items at the front, in order."""
        self._items.extendleft(reversed(items))
        self._num_items += count_items(items)

    def oldest(self, num_items: int) -> list[WaitingItem]:
        """Return the first num_items items, or all; the last may be a part."""
        found = list(islice(self._items, num_items))
        if self._num_items <= num_items:
            return found
        ends = list(accumulate([item.num_items for item in found]))
        last = bisect_left(ends, num_items)
        if ends[last] > num_items:
            whole = found[last]
            end = whole.index + whole.num_items - (ends[last] - num_items)
            found[last] = _part(whole, whole.index, end, part_of=whole)
        return found[: last + 1]

    def remove(self, leaving: list[WaitingItem]) -> None:
        """Remove items, or parts of them; the rest of an item stays in its place."""
        self._num_items -= count_items(leaving)
        taken: dict[int, list[WaitingItem]] = {}
        for item in leaving:
            taken.setdefault(id(item.part_of or item), []).append(item)
        kept: list[WaitingItem] = []
        while taken:
            item = self._items.popleft()
            own = taken.pop(id(item), None)
            if own is None:
                kept.append(item)
            elif own[0] is not item:
                kept.extend(_rest(item, own))
        self._items.extendleft(reversed(kept))


def count_items(items: Iterable[WaitingItem]) -> int:
    """Return the number of items, where several together count each."""
    return sum([item.num_items for item in items])


def singles(items: Iterable[WaitingItem]) -> Iterator[WaitingItem]:
    """Yield each of the items by itself."""
    for item in items:
        if item.num_items == 1:
            yield item
        else:
            for index in range(item.index, item.index + item.num_items):
                yield _part(item, index, index + 1)


def taken_parts(item: WaitingItem, is_taken: NDArray[np.bool_]) -> Iterator[WaitingItem]:
    """Yield the parts of several items that a step takes."""
    changes = np.flatnonzero(np.diff(is_taken, prepend=False, append=False)) + item.index
    for first, end in changes.reshape(-1, 2).tolist():
        yield _part(item, first, end, item.part_of or item)


def _rest(item: WaitingItem, parts: list[WaitingItem]) -> Iterator[WaitingItem]:
    """Yield the rest of several items that wait together, without the given parts; each part becomes an item of its own."""
    first, end = item.index, item.index + item.num_items
    for part in sorted(parts, key=lambda part: part.index):
        part.part_of = None
        if first < part.index:
            yield _part(item, first, part.index)
        first = part.index + part.num_items
    if first < end:
        yield _part(item, first, end)


def _part(item: WaitingItem, first: int, end: int, part_of: WaitingItem | None = None) -> WaitingItem:
    """Return those of several items that have the rows from first to end of their request."""
    start, stop = first - item.index, end - item.index
    costs = item.costs[start:stop]
    return msgspec.structs.replace(
        item, index=first, num_tokens=sum(costs), num_items=len(costs), costs=costs if len(costs) > 1 else (),
        work_before=item.work_before + sum(item.costs[:start]), part_of=part_of,
    )  # fmt: skip
