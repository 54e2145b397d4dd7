"""Turns the classes of a text's tokens into entities. Pure.

Matches TokenClassificationPipeline of transformers 5 for every strategy, in float32: the same words, groups and scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.values.extract import Entity

OUTSIDE = "O"
"""The class of a token that belongs to no entity."""
_BY_WORD = frozenset(("first", "average", "max"))


class Window(NamedTuple):
    """The tokens of a text that went through the model together."""

    num_before: int
    """Special tokens before the first token of the text."""
    spans: list[tuple[int, int]]
    """Start and end of each token in the text, in code points."""
    continues: list[bool]
    """Whether each token continues the previous token's word; empty for strategies that do not use words."""
    start: int = 0
    """Number of its first token among those of the whole text."""


class _Classes(NamedTuple):
    """The meaning of each class, taken from its label."""

    names: list[str]
    """The name of an entity of this class."""
    kinds: NDArray[np.intp]
    """Equal for classes whose neighbouring tokens may be one entity."""
    begins: NDArray[np.bool_]
    """Whether a token of this class always starts a new entity."""
    outside: frozenset[int]


def needs_words(strategy: str) -> bool:
    """Tell whether a strategy chooses one class for each word."""
    return strategy in _BY_WORD


def group_name(label: str) -> str:
    """Return the entity name of a class: `B-PER` and `I-PER` become `PER`."""
    return label.split("-", 1)[-1]


def read_window(logits: NDArray[np.float32], window: Window, labels: Sequence[str], strategy: str) -> list[Entity]:
    """Return a window's entities in the order of the text.

    logits (t, classes) has a row for every token, special ones included; labels is by class. strategy is one of
    `AGGREGATION_STRATEGIES`. With `none` every token is a separate entity, named by the full label of its class.
    """
    count = len(window.spans)
    if not count:
        return []
    scores = _softmax(logits[window.num_before : window.num_before + count])
    starts = np.arange(count)
    if strategy in _BY_WORD:
        starts = np.flatnonzero(~np.array([False, *window.continues[1:]]))
        scores = _word_scores(scores, starts, strategy)
    known, best, classes = _classes(tuple(labels)), scores.max(1), scores.argmax(1)
    whole = strategy == "none"
    bounds = list(range(len(classes) + 1)) if whole else _group_bounds(classes, known)
    token_bounds: list[int] = [*starts.tolist(), count]
    names = labels if whole else known.names
    found: list[Entity] = []
    for first, last in pairwise(bounds):
        class_id = int(classes[first])
        if class_id not in known.outside:
            start, end = window.spans[token_bounds[first]][0], window.spans[token_bounds[last] - 1][1]
            found.append(Entity(names[class_id], float(best[first:last].mean()), start, end))
    return found


def join_windows(logits: Sequence[NDArray[np.float32]], windows: Sequence[Window]) -> NDArray[np.float32]:
    """Return one row for each token of a text, special ones left out; rows (t_i, classes) are those of its windows.

    Of the tokens that two windows share, each window gives the half that is farther from its end.
    """
    parts: list[NDArray[np.float32]] = []
    for number, (rows, window) in enumerate(zip(logits, windows, strict=True)):
        first, last = 0, len(window.spans)
        if number:
            before = windows[number - 1]
            first = (before.start + len(before.spans) - window.start) // 2
        if number + 1 < len(windows):
            after = windows[number + 1]
            last = after.start - window.start + (window.start + last - after.start) // 2
        parts.append(rows[window.num_before + first : window.num_before + last])
    return np.concatenate(parts)


def merge_windows(entities: list[Entity]) -> list[Entity]:
    """Return the entities of overlapping windows without duplicates.

    Of two that overlap, the longer one is kept, then the one with the higher score.
    """
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


def _word_scores(scores: NDArray[np.float32], starts: NDArray[np.intp], strategy: str) -> NDArray[Any]:
    """Return one row of scores for each word, from the rows of its tokens; words begin at starts."""
    if strategy == "first":
        return scores[starts]
    sizes = np.diff(starts, append=len(scores))
    if strategy == "average":
        return np.add.reduceat(scores, starts) / sizes[:, None].astype(np.float32)
    best = scores.max(axis=1)
    words = np.repeat(np.arange(len(starts)), sizes)
    surest = np.flatnonzero(best == np.maximum.reduceat(best, starts)[words])
    return scores[surest[np.unique(words[surest], return_index=True)[1]]]  # the first of tokens with equal scores


def _group_bounds(classes: NDArray[np.intp], known: _Classes) -> list[int]:
    """Return the start of each run of neighbours of one kind, and the end; some classes always start a new run."""
    kinds = known.kinds[classes]
    is_new = (kinds[1:] != kinds[:-1]) | known.begins[classes[1:]]
    return [0, *(np.flatnonzero(is_new) + 1).tolist(), len(classes)]


@lru_cache(maxsize=64)
def _classes(labels: tuple[str, ...]) -> _Classes:
    tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
    names = [group_name(label) for label in labels]
    return _Classes(
        names,
        np.array([tags.index(tag) for tag in tags], np.intp),
        np.array([label.startswith("B-") for label in labels], np.bool_),
        frozenset(class_id for class_id, name in enumerate(names) if name == OUTSIDE),
    )
