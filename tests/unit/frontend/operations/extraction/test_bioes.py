"""Spans of begin, inside, end and single, compared with every allowed path."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from sie.catalog.calibration import NO_BIASES, is_bioes
from sie.frontend.operations.extraction.bioes import best_path, decode_spans
from sie.frontend.operations.extraction.entities import Window, join_windows
from sie.values.extract import TransitionBiases

LABELS = ("O", "B-a", "I-a", "E-a", "S-a", "B-b", "I-b", "E-b", "S-b")
BIASED = TransitionBiases(
    background_stay=-0.7, background_to_start=0.4, inside_to_continue=0.6, inside_to_end=-0.5, end_to_background=0.3,
    end_to_start=-0.9,
)  # fmt: skip


def allowed_gain(before: str, after: str, biases: TransitionBiases) -> float | None:
    """Return the bias of a step by the rules of the scheme, or None for a step that it forbids."""
    if before[0] in "BI":
        if before[2:] != after[2:] or after[0] not in "IE":
            return None
        return biases.inside_to_continue if after[0] == "I" else biases.inside_to_end
    if after[0] in "IE":
        return None
    if before == "O":
        return biases.background_stay if after == "O" else biases.background_to_start
    return biases.end_to_background if after == "O" else biases.end_to_start


def search(logs: np.ndarray, biases: TransitionBiases) -> tuple[int, ...]:
    """Return the best path among all, by trying each."""
    best, found = -np.inf, ()
    for path in product(range(len(LABELS)), repeat=len(logs)):
        names = [LABELS[number] for number in path]
        gains = [allowed_gain(*step, biases) for step in pairwise(names)]
        if names[0][0] in "IE" or names[-1][0] in "BI" or None in gains:
            continue
        total = sum(logs[place, number] for place, number in enumerate(path)) + sum(gains)  # type: ignore[arg-type]
        if total > best:
            best, found = total, path
    return found


@pytest.mark.parametrize("biases", [NO_BIASES, BIASED])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_path_is_the_best_of_all_allowed_ones(length: int, biases: TransitionBiases):
    random = np.random.default_rng(length)
    differs = 0
    for _ in range(6):
        logs = random.normal(0, 2, (length, len(LABELS)))
        path = tuple(best_path(logs, LABELS, biases).tolist())
        assert path == search(logs, biases)
        differs += path != tuple(logs.argmax(axis=1).tolist())
    assert differs, "the constraints decide"


def rows(*names: str) -> np.ndarray:
    logits = np.zeros((len(names), len(LABELS)), np.float32)
    for place, name in enumerate(names):
        logits[place, LABELS.index(name)] = 9
    return logits


def test_spans_have_no_white_space_at_their_ends_and_the_mean_of_their_probabilities():
    text = "x Ada Byron  y"
    spans = [(0, 1), (1, 5), (5, 13), (13, 14)]
    (found,) = decode_spans(rows("O", "B-a", "E-a", "O"), spans, text, LABELS, NO_BIASES)
    assert (found.label, text[found.start : found.end]) == ("a", "Ada Byron")
    assert found.score == pytest.approx(np.exp(9) / (np.exp(9) + 8))


def test_neighbours_and_kinds_are_separate_spans_and_a_lone_inside_is_none():
    spans = [(number, number + 1) for number in range(4)]
    found = decode_spans(rows("S-a", "B-b", "E-b", "S-b"), spans, "abcd", LABELS, NO_BIASES)
    assert [(one.label, one.start, one.end) for one in found] == [("a", 0, 1), ("b", 1, 3), ("b", 3, 4)]
    assert decode_spans(rows("O", "I-a", "O", "O"), spans, "abcd", LABELS, NO_BIASES) == []
    assert decode_spans(rows(), [], "", LABELS, NO_BIASES) == []


def test_windows_give_each_token_once():
    windows = [Window(1, [(0, 0)] * 6, [], 0), Window(1, [(0, 0)] * 6, [], 4), Window(1, [(0, 0)] * 4, [], 8)]
    logits = [np.array([[100 * number + row] for row in range(8)], np.float32) for number in range(3)]
    joined = join_windows(logits, windows)[:, 0].tolist()
    # Special tokens have row 0; tokens 4 and 5 are in two windows, and so are 8 and 9.
    assert joined == [1, 2, 3, 4, 5, 102, 103, 104, 105, 202, 203, 204]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (LABELS, True),
        (LABELS[:5], True),
        (LABELS[:4], False),
        (LABELS[1:], False),
        (("O", "B-PER", "I-PER"), False),
        (("O",), False),
        ((*LABELS, "MISC"), False),
        ((*LABELS[:5], "S-a"), False),
    ],
)
def test_only_whole_sets_of_begin_inside_end_and_single_are_decoded_so(labels: tuple[str, ...], expected: bool):
    assert is_bioes(labels) is expected
