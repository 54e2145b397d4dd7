"""Decodes the classes begin, inside, end and single of a text's tokens into spans, by the best allowed path. Pure.

A span is one `S`, or a `B`, any number of `I` and an `E` of the same kind. Outside of spans every token is `O`. Among all
paths of such classes the Viterbi algorithm finds the one whose log probabilities and biases have the largest sum.
Source: openai/privacy-filter.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.values.extract import Entity, TransitionBiases

_NEVER: Final = -np.inf
_OPENS: Final = ("B", "S")
_STAYS_INSIDE: Final = ("B", "I")


class _Paths(NamedTuple):
    """The allowed paths of some classes."""

    gains: NDArray[np.float64]
    """(classes, classes): what a step from the row's class to the column's gains; minus infinity if it is not allowed."""
    starts: NDArray[np.float64]
    """(classes,): 0 for a class that the first token may have, else minus infinity."""
    ends: NDArray[np.float64]
    """(classes,): the same for the last token."""


def decode_spans(
    logits: NDArray[np.float32], spans: Sequence[tuple[int, int]], text: str, labels: Sequence[str],
    biases: TransitionBiases,
) -> list[Entity]:  # fmt: skip
    """Return the entities of a text in its order, without white space at their ends.

    logits (t, classes) has a row for each token of the text, spans the tokens' starts and ends in code points, labels
    is by class. An entity's score is the mean probability of its tokens' classes.
    """
    if not len(logits):
        return []
    logs = _log_softmax(logits.astype(np.float64))
    path = best_path(logs, labels, biases)
    sure = np.exp(logs[np.arange(len(path)), path])
    found: list[Entity] = []
    first = 0
    for token, class_id in enumerate(path):
        tag, _, kind = labels[int(class_id)].partition("-")
        if tag in _OPENS:
            first = token
        if tag in ("E", "S"):
            start, end = _trim(text, spans[first][0], spans[token][1])
            if start < end:
                found.append(Entity(kind, float(sure[first : token + 1].mean()), start, end))
    return found


def best_path(logs: NDArray[np.float64], labels: Sequence[str], biases: TransitionBiases) -> NDArray[np.intp]:
    """Return the class (t,) of each token on the best allowed path; logs (t, classes) is log probabilities, t > 0."""
    paths = _paths(tuple(labels), biases)
    best = logs[0] + paths.starts
    came_from = np.zeros(logs.shape, np.intp)
    for token in range(1, len(logs)):
        sums = best[:, None] + paths.gains
        came_from[token] = sums.argmax(axis=0)
        best = sums.max(axis=0) + logs[token]
    path = np.empty(len(logs), np.intp)
    path[-1] = (best + paths.ends).argmax()
    for token in range(len(logs) - 1, 0, -1):
        path[token - 1] = came_from[token, path[token]]
    return path


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Return a span's bounds without white space at its ends: tokens of bytes hold the space before a word."""
    piece = text[start:end]
    return end - len(piece.lstrip()), start + len(piece.rstrip())


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[Any]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@lru_cache(maxsize=64)
def _paths(labels: tuple[str, ...], biases: TransitionBiases) -> _Paths:
    parts = [label.partition("-") for label in labels]
    gains = [[_gain(before, after, biases) for after in parts] for before in parts]
    starts = [0.0 if tag == "O" or tag in _OPENS else _NEVER for tag, _, _ in parts]
    ends = [_NEVER if tag in _STAYS_INSIDE else 0.0 for tag, _, _ in parts]
    return _Paths(np.array(gains), np.array(starts), np.array(ends))


def _gain(before: tuple[str, str, str], after: tuple[str, str, str], biases: TransitionBiases) -> float:
    """Return what a step between two classes gains, or minus infinity."""
    (old, _, old_kind), (new, _, new_kind) = before, after
    if old in _STAYS_INSIDE:
        if old_kind != new_kind:
            return _NEVER
        return {"I": biases.inside_to_continue, "E": biases.inside_to_end}.get(new, _NEVER)
    stay, start = (
        (biases.background_stay, biases.background_to_start)
        if old == "O"
        else (biases.end_to_background, biases.end_to_start)
    )
    if new == "O":
        return stay
    return start if new in _OPENS else _NEVER
