from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie.workers.packed.adjacent import AdjacentItems
from sie.workers.packed.batch import (
    LIGHT_AREA,
    MOST_PADDING,
    SMALL_AREA,
    Rectangle,
    Run,
    pack_sequences,
    rectangles,
    rounded_tokens,
    with_filler,
)


def _sequences(lengths: list[int]) -> list[np.ndarray]:
    return [np.arange(100 * i, 100 * i + length, dtype=np.int32) for i, length in enumerate(lengths)]


def test_sequences_lie_in_order_of_length() -> None:
    batch = pack_sequences(_sequences([3, 1, 3, 2]))
    assert batch.order.tolist() == [1, 3, 0, 2]
    assert batch.input_ids.tolist() == [100, 300, 301, 0, 1, 2, 200, 201, 202]
    assert batch.position_ids.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 1, 3, 6, 9]
    assert batch.runs == (Run(0, 1, 1), Run(1, 1, 2), Run(3, 2, 3))
    assert batch.max_length == 3


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_every_sequence_is_found_again(lengths: list[int]) -> None:
    sequences = _sequences(lengths)
    batch = pack_sequences(sequences)
    bounds = batch.cu_seqlens.tolist()
    for row, item in enumerate(batch.order):
        part = slice(bounds[row], bounds[row + 1])
        assert batch.input_ids[part].tolist() == sequences[item].tolist()
        assert batch.position_ids[part].tolist() == list(range(lengths[item]))
    assert sum(run.count * run.length for run in batch.runs) == len(batch.input_ids) == bounds[-1]
    assert len({run.length for run in batch.runs}) == len(batch.runs)


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=6), min_size=1, max_size=6))
def test_items_that_lie_back_to_back_are_packed_like_others(pieces: list[list[int]]) -> None:
    sequences = _sequences([length for piece in pieces for length in piece])
    ends = np.cumsum([len(piece) for piece in pieces])
    joined = [np.concatenate(some) for some in np.split(np.array(sequences, object), ends[:-1])]
    adjacent = AdjacentItems(joined, [len(ids) for ids in sequences])

    for ours, others in zip(pack_sequences(adjacent), pack_sequences(sequences), strict=True):
        assert np.array_equal(ours, others)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_step_without_tokens_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        pack_sequences(_sequences(lengths))


def test_input_is_copied() -> None:
    source = np.array([7, 8], dtype=np.int32)
    batch = pack_sequences([source])
    source[:] = 0
    assert batch.input_ids.tolist() == [7, 8]


def test_few_widths_are_enough_for_every_step():
    widths = [rounded_tokens(n) for n in range(1, 1025)]
    assert all(n <= width < n + 32 for n, width in enumerate(widths, start=1))
    assert len(set(widths)) <= 44
    assert rounded_tokens(10_000) == 10_240


def test_filler_is_one_more_sequence_behind_the_others():
    batch = pack_sequences([np.array([7, 8, 9]), np.array([5])], [np.array([0, 1, 1]), np.array([0])])
    filled = with_filler(batch, 4)
    assert filled.input_ids[:4].tolist() == batch.input_ids.tolist()
    assert filled.position_ids.tolist() == [0, 0, 1, 2, 0, 1, 2, 3]
    assert filled.cu_seqlens.tolist() == [0, 1, 4, 8]
    assert filled.runs[-1] == (4, 1, 4)
    assert filled.max_length == 4
    assert filled.token_types is not None
    assert filled.token_types.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert filled.order.tolist() == batch.order.tolist()


def test_without_padding_each_length_is_a_rectangle() -> None:
    batch = pack_sequences(_sequences([3, 1, 3, 2]))
    assert rectangles(batch.runs, pads=False) == [Rectangle(0, 1, 1, 1), Rectangle(1, 1, 2, 2), Rectangle(3, 2, 6, 3)]


def test_with_padding_similar_lengths_share_a_rectangle() -> None:
    batch = pack_sequences(_sequences([200, 400, 300, 250, 500]))
    assert rectangles(batch.runs, pads=True) == [Rectangle(0, 2, 450, 250), Rectangle(450, 3, 1200, 500)]


@given(st.lists(st.integers(1, 600), min_size=1, max_size=80))
def test_padding_is_bounded_and_no_token_is_lost(lengths: list[int]) -> None:
    batch = pack_sequences(_sequences(lengths))
    found = rectangles(batch.runs, pads=True)
    ordered = sorted(lengths)
    first = start = 0
    for rectangle in found:
        own = ordered[first : first + rectangle.count]
        assert (rectangle.start, rectangle.num_tokens, rectangle.width) == (start, sum(own), max(own))
        is_full = rectangle.num_tokens >= (1 - MOST_PADDING) * rectangle.area
        assert is_full or rectangle.area <= SMALL_AREA
        assert rectangle.area <= max(LIGHT_AREA, sum(lengths))
        first, start = first + rectangle.count, start + rectangle.num_tokens
    assert (first, start) == (len(lengths), sum(lengths))
    assert len(found) <= len(batch.runs)


@pytest.mark.parametrize("lengths", [range(5, 305, 5), range(8, 513, 8), [*range(4, 34), *range(100, 130)]])
def test_sixty_lengths_make_few_rectangles(lengths: list[int]) -> None:
    assert len(rectangles(pack_sequences(_sequences([*lengths] * 3)).runs, pads=True)) <= 6
