"""Cuts a text into windows that fit a span model, and joins the spans of all windows.

Pure. Positions are code points. Words are those of the `gliner` library. A window begins and ends at word boundaries,
so the library splits it into the same words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from sie.values.extract import Entity
from sie.values.spans import choose_spans

_WORD: Final = re.compile(r"\w+(?:[-_]\w+)*|\S")  # gliner 0.2.29, WhitespaceTokenSplitter
_MAX_WORD_CHARS: Final = 256
"""A longer word is split into pieces of this many code points. Otherwise one unbroken run could fill any memory."""
_OVERLAP_WORDS: Final = 64
"""Words that neighbouring windows share: several times the longest span of such models."""


class Window(NamedTuple):
    """Code points start .. end of a text; cost is the number of tokens of its words."""

    start: int
    end: int
    cost: int


def split_words(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each word of a text; a very long word is split into pieces."""
    words: list[tuple[int, int]] = []
    for match in _WORD.finditer(text):
        start, end = match.span()
        while end - start > _MAX_WORD_CHARS:
            words.append((start, start + _MAX_WORD_CHARS))
            start += _MAX_WORD_CHARS
        words.append((start, end))
    return words


def plan_windows(
    words: Sequence[tuple[int, int]],
    costs: Sequence[int],
    *,
    max_words: int,
    max_tokens: int,
    overlap: int | None = None,
) -> list[Window]:
    """Return windows that cover all words; each has as many words as both limits allow, and at least one new word.

    costs are the words' token counts. A window after the first begins with the last words of the previous window:
    overlap of them, or some by default.
    """
    windows: list[Window] = []
    first, end = 0, 0
    while end < len(words):
        end, tokens = first + 1, costs[first]
        while end < len(words) and end - first < max_words and tokens + costs[end] <= max_tokens:
            tokens += costs[end]
            end += 1
        windows.append(Window(words[first][0], words[end - 1][1], tokens))
        shared = min(_OVERLAP_WORDS, (end - first) // 2) if overlap is None else overlap
        first = max(first + 1, end - shared)
        while first < end and sum(costs[first : end + 1]) > max_tokens:
            first += 1  # otherwise the next window would contain no new word
    return windows


def merge_windows(
    windows: Sequence[Window], found: Sequence[Sequence[Entity]], *, flat: bool, multi_label: bool
) -> list[Entity]:
    """Return the entities of a text from those of its windows, whose positions count from each window's start.

    Entities of a single window stay unchanged. With several windows, three rules apply. An entity cut by a window's
    edge is replaced by the neighbour's overlapping entity of that label. Duplicates become one with the higher score.
    `choose_spans` resolves overlaps, as within a window. The result is in order of position.
    """
    placed = [
        [moved(entity, window.start) for entity in own] for window, own in zip(windows, found, strict=True)
    ]  # fmt: skip
    if len(placed) == 1:
        return placed[0]
    by_label = [_by_label(own) for own in placed]
    best: dict[tuple[int, int, str], Entity] = {}
    for number, own in enumerate(placed):
        for entity in own:
            key = (*_span(entity), entity.label)
            if (key not in best or entity.score > best[key].score) and not _is_cut(entity, number, windows, by_label):
                best[key] = entity
    best_first = sorted(best.values(), key=lambda entity: -entity.score)
    kept = choose_spans([_span(entity) for entity in best_first], flat=flat, multi_label=multi_label)
    return sorted((best_first[place] for place in kept), key=_span)


def merge_adjacent(entities: Sequence[Entity]) -> list[Entity]:
    """Join entities of one label that touch or have one code point between them; the higher score is kept.

    Source: SIE API reference, section 19 (models that classify tokens give one entity a word).
    """
    merged: list[Entity] = []
    for entity in sorted(entities, key=_span):
        last = merged[-1] if merged else None
        if last is None or last.label != entity.label or _span(entity)[0] > _span(last)[1] + 1:
            merged.append(entity)
            continue
        end = max(_span(last)[1], _span(entity)[1])
        merged[-1] = msgspec.structs.replace(last, end=end, score=max(last.score, entity.score))
    return merged


def _span(entity: Entity) -> tuple[int, int]:
    assert entity.start is not None
    assert entity.end is not None
    return entity.start, entity.end


def moved(entity: Entity, offset: int) -> Entity:
    """Return an entity with its positions moved by offset code points."""
    start, end = _span(entity)
    return msgspec.structs.replace(entity, start=start + offset, end=end + offset)


def _by_label(entities: Sequence[Entity]) -> dict[str, list[Entity]]:
    groups: dict[str, list[Entity]] = {}
    for entity in entities:
        groups.setdefault(entity.label, []).append(entity)
    return groups


def _is_cut(
    entity: Entity, number: int, windows: Sequence[Window], by_label: Sequence[dict[str, list[Entity]]]
) -> bool:
    """Tell whether a neighbour window covers this edge entity whole and has an overlapping entity of its label."""
    start, end = _span(entity)
    neighbours: list[int] = []
    if number > 0 and start <= windows[number].start:
        neighbours.append(number - 1)
    if number + 1 < len(windows) and end >= windows[number].end:
        neighbours.append(number + 1)
    return any(
        windows[other].start <= start
        and end <= windows[other].end
        and any(_overlap(entity, rival) for rival in by_label[other].get(entity.label, ()))
        for other in neighbours
    )


def _overlap(entity: Entity, other: Entity) -> bool:
    (start, end), (other_start, other_end) = _span(entity), _span(other)
    return start < other_end and other_start < end
