"""Owns how the classes of a text's tokens become entities. Pure.

Does what TokenClassificationPipeline of transformers 5 does, strategy by strategy, in float32: the same words, the same
groups, the same scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.extraction import Entity

OUTSIDE = "O"
"""The class of a token that belongs to no entity."""
_BY_WORD = frozenset(("first", "average", "max"))


class Window(NamedTuple):
    """The tokens of a text that went through the model together."""

    num_before: int
    """Special tokens before the first token of the text."""
    spans: list[tuple[int, int]]
    """Where each token lies in the text, in code points."""
    continues: list[bool]
    """Whether a token goes on with the word of the one before; empty for strategies that know no words."""


class _Piece(NamedTuple):
    """A token or a word with its class."""

    class_id: int
    score: np.float32
    start: int
    end: int


def needs_words(strategy: str) -> bool:
    """Tell whether a strategy settles on one class for each word."""
    return strategy in _BY_WORD


def group_name(label: str) -> str:
    """Return what an entity of a class is called: `B-PER` and `I-PER` are `PER`."""
    return label.split("-", 1)[-1]


def read_window(logits: NDArray[np.float32], window: Window, labels: Sequence[str], strategy: str) -> list[Entity]:
    """Return a window's entities in the order of the text.

    logits (t, classes) has a row for every token, special ones included; labels is by class. strategy is one of
    `AGGREGATION_STRATEGIES`; with `none` every token is an entity of its own, under its class's full label.
    """
    count = len(window.spans)
    if not count:
        return []
    scores = _softmax(logits[window.num_before : window.num_before + count])
    if strategy in _BY_WORD:
        pieces = [_word(scores[a:b], window.spans[a:b], strategy) for a, b in pairwise(_word_bounds(window.continues))]
    else:
        classes, best = scores.argmax(1).tolist(), scores.max(1)
        pieces = [_Piece(*piece) for piece in zip(classes, best, *zip(*window.spans, strict=True), strict=True)]
    if strategy == "none":
        return [Entity(labels[piece.class_id], float(piece.score), piece.start, piece.end)
                for piece in pieces if labels[piece.class_id] != OUTSIDE]  # fmt: skip
    return [
        Entity(name, float(np.mean([piece.score for piece in group])), group[0].start, group[-1].end)
        for group in _groups(pieces, labels)
        if (name := group_name(labels[group[0].class_id])) != OUTSIDE
    ]


def merge_windows(entities: list[Entity]) -> list[Entity]:
    """Return the entities of overlapping windows, each once: of two that overlap the longer, then the surer one."""
    merged: list[Entity] = []
    for entity in sorted(entities, key=_start):
        last = merged[-1] if merged else None
        if last is None or not _start(last) <= _start(entity) < (last.end or 0):
            merged.append(entity)
        elif (_length(entity), entity.score) > (_length(last), last.score):
            merged[-1] = entity
    return merged


def _start(entity: Entity) -> int:
    return entity.start or 0


def _length(entity: Entity) -> int:
    return (entity.end or 0) - (entity.start or 0)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def _word_bounds(continues: list[bool]) -> list[int]:
    """Return where words begin, and the end; the first token always begins one."""
    return [0, *(index for index in range(1, len(continues)) if not continues[index]), len(continues)]


def _word(scores: NDArray[Any], spans: list[tuple[int, int]], strategy: str) -> _Piece:
    if strategy == "average":
        row = scores.mean(axis=0)
    else:
        row = scores[0 if strategy == "first" else int(scores.max(axis=1).argmax())]
    class_id = int(row.argmax())
    return _Piece(class_id, row[class_id], spans[0][0], spans[-1][1])


def _groups(pieces: list[_Piece], labels: Sequence[str]) -> Iterator[list[_Piece]]:
    """Yield runs of neighbours of one kind; a class that begins with `B-` starts a new run."""
    kinds = [_kind(label) for label in labels]
    group = pieces[:1]
    for piece in pieces[1:]:
        begins, kind = kinds[piece.class_id]
        if kind == kinds[group[-1].class_id][1] and not begins:
            group.append(piece)
        else:
            yield group
            group = [piece]
    yield group


def _kind(label: str) -> tuple[bool, str]:
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label
