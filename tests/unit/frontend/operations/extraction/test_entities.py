from __future__ import annotations

from sie.frontend.operations.extraction.entities import merge_windows
from sie.values.extract import Entity


def entity(start: int, end: int, score: float = 0.5) -> Entity:
    return Entity("PER", score, start, end)


def test_of_two_that_overlap_the_longer_is_kept():
    assert merge_windows([entity(0, 4), entity(2, 9)]) == [entity(2, 9)]
    assert merge_windows([entity(5, 9), entity(0, 4)]) == [entity(0, 4), entity(5, 9)]
    assert merge_windows([entity(0, 4), entity(4, 5)]) == [entity(0, 4), entity(4, 5)]


def test_of_two_of_one_length_the_surer_is_kept():
    assert merge_windows([entity(0, 4, 0.25), entity(0, 4, 0.75)]) == [entity(0, 4, 0.75)]
    assert merge_windows([entity(0, 4, 0.75), entity(0, 4, 0.25)]) == [entity(0, 4, 0.75)]


def test_nothing_is_merged_to_nothing():
    assert merge_windows([]) == []
