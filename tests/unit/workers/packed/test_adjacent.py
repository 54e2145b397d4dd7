"""Items that lie back to back: each is a view, and several together are one piece."""

from __future__ import annotations

import numpy as np
import pytest

from sie.workers.packed.adjacent import AdjacentItems, lengths_of

DATA = np.arange(6, dtype=np.int32)


def values(items: AdjacentItems) -> list[list[int]]:
    return [item.tolist() for item in items]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([2, 1, 3], [[0, 1], [2], [3, 4, 5]]),
        ([0, 6, 0], [[], [0, 1, 2, 3, 4, 5], []]),
        ([3, 0, 3], [[0, 1, 2], [], [3, 4, 5]]),
    ],
)
def test_each_item_is_a_view_in_its_place(lengths: list[int], expected: list[list[int]]) -> None:
    items = AdjacentItems([DATA], lengths)
    assert values(items) == expected
    assert items[1].tolist() == expected[1]
    assert [item.tolist() for item in items[1:]] == expected[1:]
    assert len(items) == len(lengths_of(items)) == 3
    assert all(np.shares_memory(item, DATA) for item in items if len(item))


def test_items_of_several_pieces_stand_in_order() -> None:
    empty = DATA[:0]
    items = AdjacentItems([DATA[:2], empty, DATA[2:]], [1, 1, 0, 3, 1])
    assert values(items) == [[0], [1], [], [2, 3, 4], [5]]
    assert items.joined().tolist() == DATA.tolist()
    assert lengths_of(list(items)) == items.lengths


def test_a_part_is_one_piece() -> None:
    part = AdjacentItems([DATA], [2, 1, 0, 2, 1]).part(1, 4)
    assert values(part) == [[2], [], [3, 4]]
    assert [piece.tolist() for piece in part.pieces] == [[2, 3, 4]]
