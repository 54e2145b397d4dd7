from __future__ import annotations

import itertools

import pytest

from sie.frontend.inputs.text_windows import Window, merge_adjacent, merge_windows, plan_windows, split_words
from sie.values.extract import Entity

TWO = [Window(0, 40, 10), Window(20, 60, 10)]
"""Windows that share the code points 20 .. 40."""


def entity(start: int, end: int, score: float = 0.9, label: str = "a") -> Entity:
    return Entity(label, score, start, end)


def join(first: list[Entity], second: list[Entity], *, flat: bool = True, multi_label: bool = False) -> list[Entity]:
    return merge_windows(TWO, [first, second], flat=flat, multi_label=multi_label)


def test_words_are_the_librarys() -> None:
    splitter = pytest.importorskip("gliner.data_processing.tokenizer").WhitespaceTokenSplitter()
    text = " Ada-Lovelace's 2_x e\u0301te\u0301 😀 日本語, naïve\n(ok) - _"
    assert split_words(text) == [(start, end) for _, start, end in splitter(text)]


def test_long_word_counts_as_pieces_without_a_gap() -> None:
    words = split_words("ab " + "x" * 600 + " cd")
    assert words[0] == (0, 2)
    assert words[-1] == (604, 606)
    assert [end - start for start, end in words[1:-1]] == [256, 256, 88]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(words[1:-1]))


@pytest.mark.parametrize(("max_words", "max_tokens"), [(10, 1000), (10, 12), (1, 5), (300, 1), (7, 3)])
def test_windows_hold_every_word_within_the_limits(max_words: int, max_tokens: int) -> None:
    words = [(5 * number, 5 * number + 4) for number in range(137)]
    costs = [1 + number % 3 for number in range(137)]
    windows = plan_windows(words, costs, max_words=max_words, max_tokens=max_tokens)
    held = set()
    for window in windows:
        own = [n for n, (start, end) in enumerate(words) if window.start <= start and end <= window.end]
        assert len(own) <= max_words
        assert window.cost == sum(costs[n] for n in own)
        assert window.cost <= max_tokens or len(own) == 1
        assert not held.issuperset(own)
        held.update(own)
    assert held == set(range(137))
    assert [window.start for window in windows] == sorted({window.start for window in windows})


def test_neighbours_share_up_to_64_words() -> None:
    words = [(2 * number, 2 * number + 1) for number in range(1000)]
    first, second, *_ = plan_windows(words, [1] * 1000, max_words=384, max_tokens=10_000)
    assert (first.end - second.start + 1) // 2 == 64
    assert len(plan_windows(words[:384], [1] * 384, max_words=384, max_tokens=10_000)) == 1


def test_one_window_keeps_its_entities_as_they_are() -> None:
    own = [entity(5, 9), entity(2, 6), entity(5, 9, label="b")]
    found = merge_windows([Window(3, 60, 10)], [own], flat=True, multi_label=False)
    assert found == [entity(8, 12), entity(5, 9), entity(8, 12, label="b")]


def test_found_twice_counts_once_with_the_higher_score() -> None:
    assert join([entity(25, 30, 0.6)], [entity(5, 10, 0.8)]) == [entity(25, 30, 0.8)]


def test_cut_at_an_edge_gives_way_to_the_neighbours_whole_one() -> None:
    assert join([entity(36, 40, 0.99)], [entity(16, 26, 0.6)]) == [entity(36, 46, 0.6)]
    assert join([entity(18, 24, 0.6)], [entity(0, 4, 0.99)]) == [entity(18, 24, 0.6)]


def test_at_an_edge_without_a_rival_it_stays() -> None:
    assert join([entity(36, 40, 0.7)], [entity(16, 26, 0.6, "b")]) == [entity(36, 40, 0.7)]
    assert join([entity(36, 40, 0.7)], []) == [entity(36, 40, 0.7)]


def test_overlap_is_settled_as_in_one_window() -> None:
    nested = ([entity(24, 34, 0.9)], [entity(6, 8, 0.8, "b")])
    assert join(*nested) == [entity(24, 34, 0.9)]
    assert join(*nested, flat=False) == [entity(24, 34, 0.9), entity(26, 28, 0.8, "b")]
    crossing = ([entity(24, 34, 0.9)], [entity(10, 18, 0.8, "b")])
    assert join(*crossing, flat=False) == [entity(24, 34, 0.9)]
    same = ([entity(24, 34, 0.9)], [entity(4, 14, 0.8, "b")])
    assert join(*same) == [entity(24, 34, 0.9)]
    assert join(*same, multi_label=True) == [entity(24, 34, 0.9), entity(24, 34, 0.8, "b")]


def test_adjacent_entities_of_a_label_become_one() -> None:
    found = [entity(0, 5, 0.6), entity(6, 10, 0.9), entity(10, 12, 0.7), entity(14, 16), entity(17, 20, label="b")]
    assert merge_adjacent(found) == [entity(0, 12, 0.9), entity(14, 16), entity(17, 20, label="b")]
    assert merge_adjacent([]) == []
