"""Prepares requests to a union of GLiNER models and reads their replies: all entities, and names wherever they recur.

Source: the composition of sie-server 0.10.1, `adapters/gliner_union`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.text_windows import Window, merge_adjacent, moved
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction import gliner
from sie.frontend.operations.extraction.gliner import WindowReading
from sie.values.errors import BadRequest
from sie.values.extract import Entity, Extraction, ExtractTask, Gliner, GlinerUnion

_WINDOW_WORDS: Final = 300
_WINDOW_OVERLAP: Final = 50
_NAME_MIN_LETTERS: Final = 3
_LETTER: Final = r"[^\W\d_]"
_NAMES: Final = re.compile(f"{_LETTER}+")


def check_task(model_id: str, rule: GlinerUnion, task: ExtractTask) -> None:
    """Raise BadRequest for labels that no member takes, and for windows that a member cannot read or that never move."""
    gliner.check_task(rule.members[0].rule, task)
    size, overlap = _window(rule, task)
    if size > rule.max_words:
        raise BadRequest(
            f"Model '{model_id}' reads at most {rule.max_words} words at once - at `$.params.options.window_words`"
        )
    if overlap >= size:
        raise BadRequest(
            f"Windows of {size} words cannot share {overlap} of them - at `$.params.options.window_overlap`"
        )


def _window(rule: GlinerUnion, task: ExtractTask) -> tuple[int, int]:
    """Return the words of a window, and how many of them its neighbour shares."""
    size = min(_WINDOW_WORDS, rule.max_words) if task.window_words is None else task.window_words
    overlap = min(_WINDOW_OVERLAP, size // 2) if task.window_overlap is None else task.window_overlap
    return size, overlap


class UnionReading:
    """Prepares and reads one request; its work has one item for each window of a text, which every member reads."""

    def __init__(self, rule: GlinerUnion, task: ExtractTask, tokenizer: Tokenizer, limits: Limits) -> None:
        size, overlap = _window(rule, task)
        reads_apart = all(member.rule.reads_labels_apart for member in rule.members)
        window_rule = Gliner(max_words=size, reads_labels_apart=reads_apart)
        self._rule = rule
        self._task = task
        self._windows = WindowReading(window_rule, task, tokenizer, limits, overlap=overlap)
        self.cuts = self._windows.cuts

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent; a window costs its tokens once for each member.

        Raises the errors of `WindowReading.prepare`.
        """
        (name, bounds), *others = self._windows.prepare(texts)
        return [(name, (bounds * len(self._rule.members)).astype(np.int32)), *others]

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return the entities in each text, in the order of their positions."""
        return [Extraction(self._join(*own)) for own in self._windows.read_windows(pieces)]

    def _join(self, text: str, windows: list[Window], found: list[Extraction]) -> list[Entity]:
        task = self._task
        by_window = [self._of_members(own) for own in found]
        every = (
            moved(entity, window.start)
            for member in range(len(self._rule.members))
            for window, own in zip(windows, by_window, strict=True)
            for entity in own[member]
        )
        entities = _best_of_each(entity for entity in every if entity.score >= (task.score_floor or 0.0))
        if task.propagate_label:
            least = _NAME_MIN_LETTERS if task.name_min_letters is None else task.name_min_letters
            entities += _recurring(text, entities, task.propagate_label, least)
        return sorted(entities, key=_span)

    def _of_members(self, window: Extraction) -> list[list[Entity]]:
        """Return each member's entities in a window, joined to neighbours for members that name single words.

        Raises ValueError for an answer of other members.
        """
        counts = window.data.get("members", ())
        bounds = list(accumulate(counts, initial=0))
        if bounds[-1] != len(window.entities):
            raise ValueError("an answer whose entities are not counted by member")
        found = [window.entities[start:end] for start, end in pairwise(bounds)]
        return [
            merge_adjacent(own) if member.merge_adjacent_entities else own
            for member, own in zip(self._rule.members, found, strict=True)
        ]


def _span(entity: Entity) -> tuple[int, int]:
    return entity.start or 0, entity.end or 0


def _best_of_each(entities: Iterator[Entity]) -> list[Entity]:
    """Return each entity once, with its highest score; entities of other ends or labels are others."""
    best: dict[tuple[int, int, str], Entity] = {}
    for entity in entities:
        key = (*_span(entity), entity.label)
        if key not in best or entity.score > best[key].score:
            best[key] = entity
    return list(best.values())


def _recurring(text: str, entities: Sequence[Entity], label: str, min_letters: int) -> list[Entity]:
    """Return every other whole-word occurrence, case included, of a name in an entity of this label.

    A name is a run of min_letters letters or more. One inside any entity is not another occurrence. It has the
    best score of the entities that its name is from.
    """
    names: dict[str, float] = {}
    for entity in entities:
        if entity.label == label:
            for name in _NAMES.findall(text, *_span(entity)):
                if len(name) >= min_letters:
                    names[name] = max(names.get(name, entity.score), entity.score)
    return _occurrences(text, names, _Covered(text, entities), label) if names else []


class _Covered:
    """Answers whether a piece of a text lies within one entity."""

    def __init__(self, text: str, entities: Sequence[Entity]) -> None:
        ends = np.zeros(len(text) + 1, np.int64)
        for start, end in map(_span, entities):
            ends[start] = max(ends[start], end)
        self._last_end = np.maximum.accumulate(ends)

    def holds(self, start: int, end: int) -> bool:
        """Tell whether an entity that begins at start or before ends at end or later."""
        return bool(self._last_end[start] >= end)


def _occurrences(text: str, names: Mapping[str, float], covered: _Covered, label: str) -> list[Entity]:
    """Return the occurrences of names outside of entities, by name and place, in one pass over the text."""
    found = [
        Entity(label, names[match[0]], *match.span())
        for match in _NAMES.finditer(text)
        if match[0] in names and not covered.holds(*match.span())
    ]
    return sorted(found, key=lambda entity: (text[entity.start : entity.end], _span(entity)))
