"""Prepares GLiNER requests and reads their replies: checks tasks, cuts texts into windows, joins the entities.

Each sequence holds the labels and then one window. Source: SIE API reference, section 19.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.text_windows import Window, merge_adjacent, merge_windows, plan_windows, split_words
from sie.frontend.inputs.tokenize import Tokenizer, bounds_of, too_long, unicode_error
from sie.frontend.operations.extraction import gliner2
from sie.frontend.operations.extraction.whole_texts import read_whole
from sie.values.errors import BadRequest, InputTooLong
from sie.values.extract import Extraction, ExtractTask, Gliner, Relation

_LEAST_RELEX_THRESHOLD: Final = 0.1
"""Each span over the threshold is a candidate for every relation. Near zero, every span is a candidate."""
_MARKERS: Final = ("<<ENT>>", "<<REL>>", "<<SEP>>")
_SPECIAL_TOKENS: Final = 4
_MAX_TOKENS_PER_WORD: Final = 8
"""An average over a window. Attention grows with the square of the tokens, but the library's limit counts words."""


class _Plan(NamedTuple):
    """The windows of one text."""

    text: str
    windows: list[Window]


def check_task(rule: Gliner, task: ExtractTask) -> None:
    """Raise BadRequest for a blank label, a label with a marker, or a threshold too low for relations."""
    for where, label in _labels_of(task):
        if not label.strip():
            raise BadRequest(f"A label must not be blank - at {where}")
        if any(marker in label for marker in _MARKERS):
            raise BadRequest(f"A label must not hold any of {', '.join(_MARKERS)} - at {where}")
    if rule.library == "gliner2":
        gliner2.check_task(task)
    elif rule.relations and task.threshold is not None and task.threshold < _LEAST_RELEX_THRESHOLD:
        raise BadRequest(f"A model that finds relations needs a threshold of at least {_LEAST_RELEX_THRESHOLD}")


def _labels_of(task: ExtractTask) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every label, relation labels included."""
    paths = [("labels", task.labels), ("options.relation_labels", task.relation_labels)]
    paths += [(f"options.label_groups[{group.name!r}]", (group.name, *group.labels)) for group in task.label_groups]
    for path, labels in paths:
        for index, label in enumerate(labels):
            yield f"`$.params.{path}[{index}]`", label


class WindowReading:
    """Prepares and reads one request; its work has one item for each window of a text."""

    def __init__(
        self, rule: Gliner, task: ExtractTask, tokenizer: Tokenizer, limits: Limits, *, overlap: int | None = None
    ) -> None:
        """Prepare for one request; overlap is the number of words that neighbouring windows share, or None."""
        self._rule = rule
        self._overlap = overlap
        self._task = task
        self._tokenizer = tokenizer
        self._limits = limits
        self._plans: list[_Plan] = []
        self.cuts: Cuts = {}

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent.

        Raises BadRequest for a blank text and for labels over max_prompt_tokens. Raises InputTooLong for a text with
        too many windows, or one that overflow_policy `error` rejects.
        """
        self._check_labels()
        try:
            prompt_tokens = self._count_prompt()
            self._plans = [_Plan(text, self._cut(index, text, prompt_tokens)) for index, text in enumerate(texts)]
            parts = [plan.text[start:end].encode() for plan in self._plans for start, end, _ in plan.windows]
        except (TypeError, UnicodeEncodeError) as error:
            raise unicode_error((*texts, *self._task.labels, *self._task.relation_labels), error) from None
        overhead = prompt_tokens + _SPECIAL_TOKENS
        costs = [window.cost + overhead for plan in self._plans for window in plan.windows]
        return [
            ("cu_seqlens", bounds_of(costs, len(costs))),
            ("text", np.frombuffer(b"".join(parts), np.uint8)),
            ("text_offsets", bounds_of(map(len, parts), len(parts))),
        ]

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return the findings in each text; pieces are the windows' extractions as msgpack, uint8."""
        return [self._join(windows, found) for _, windows, found in self.read_windows(pieces)]

    def read_windows(self, pieces: Sequence[NDArray[Any]]) -> Iterator[tuple[str, list[Window], list[Extraction]]]:
        """Yield each text with its windows and their findings."""
        answers = iter(read_whole(pieces))
        for plan in self._plans:
            yield plan.text, plan.windows, [next(answers) for _ in plan.windows]

    def _join(self, windows: list[Window], found: list[Extraction]) -> Extraction:
        task, groups = self._task, Extraction()
        if self._rule.library == "gliner2":
            entities, groups = gliner2.join_entities(windows, found), gliner2.join_groups(task, found)
        else:
            entities = merge_windows(
                windows,
                [extraction.entities for extraction in found],
                flat=task.flat_ner is not False,
                multi_label=bool(task.multi_label),
            )
        if task.merge_adjacent_entities:
            entities = merge_adjacent(entities)
        # Relations have no places: words that are repeated, have two labels or lie in two windows make equal ones.
        relations = _best([relation for extraction in found for relation in extraction.relations])
        relations.sort(key=lambda one: (-one.score, one.relation, one.head, one.tail))
        return Extraction(entities, relations, groups.classifications, data=groups.data)

    def _check_labels(self) -> None:
        limits = self._limits
        labels = list(_labels_of(self._task))
        if len(labels) > limits.max_labels:
            raise BadRequest(
                f"'labels', 'relation_labels' and 'label_groups' together must be at most {limits.max_labels}"
            )
        for where, label in labels:
            if len(label) > limits.max_label_chars:
                raise BadRequest(f"A label may have at most {limits.max_label_chars} characters - at {where}")

    def _count_prompt(self) -> int:
        """Return the number of tokens of the labels, each with its marker, and of the one or two marks after them."""
        task = self._task
        if self._rule.library == "gliner2":
            num_tokens = sum(map(len, self._tokenizer.encode_plain(gliner2.prompt_words(task))))
        else:
            labels = [*dict.fromkeys(task.labels), *dict.fromkeys(task.relation_labels)]
            num_tokens = sum(len(ids) + 1 for ids in self._tokenizer.encode_plain(labels)) + 1 + self._rule.relations
        limit = self._limits.max_prompt_tokens
        if num_tokens > limit:
            raise BadRequest(f"The labels take {num_tokens} tokens, over max_prompt_tokens ({limit})")
        return num_tokens

    def _cut(self, index: int, text: str, prompt_tokens: int) -> list[Window]:
        rule, policy, max_windows = self._rule, self._task.overflow_policy, self._limits.max_text_windows
        words = split_words(text)
        if not words:
            raise BadRequest(f"A text must not be blank - at `$.items[{index}].text`")
        if len(words) > max_windows * rule.max_words and policy == "default":
            raise self._too_long(index, f"{len(words)} words need over {max_windows} windows of {rule.max_words}")
        room = self._room(prompt_tokens)
        is_cut = len(words) > rule.max_words
        if policy == "truncate_text":
            words = words[: rule.max_words]
        words, costs = self._fit_words(index, text, words, room)
        windows = plan_windows(words, costs, max_words=rule.max_words, max_tokens=room, overlap=self._overlap)
        if policy == "truncate_text":
            if is_cut or len(windows) > 1:
                self.cuts[index] = room
            return windows[:1]
        if policy == "error" and len(windows) > 1:
            raise self._too_long(index, f"{len(words)} words, and the model reads at most {rule.max_words} at once")
        if len(windows) > max_windows:
            raise self._too_long(index, f"it needs {len(windows)} windows, over max_text_windows ({max_windows})")
        return windows

    def _room(self, prompt_tokens: int) -> int:
        """Return how many tokens of text fit in a window. Raises InputTooLong when the labels leave no room."""
        most = _MAX_TOKENS_PER_WORD * self._rule.max_words
        limit = self._tokenizer.card.max_sequence_length
        if limit is None:
            return most
        taken = _SPECIAL_TOKENS + (0 if self._rule.reads_labels_apart else prompt_tokens)
        if taken >= limit:
            raise too_long(
                self._tokenizer.card,
                f"the labels take {prompt_tokens} tokens of the {limit} that the model reads at once, and leave "
                "none for the text",
            )
        return min(most, limit - taken)

    def _fit_words(
        self, index: int, text: str, words: list[tuple[int, int]], room: int
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the words and their token counts; a word over room is split into pieces. Raises InputTooLong.

        Scripts without spaces make words of any length, and the model cannot run more tokens than it has positions.
        """
        while max(costs := self._count_words(text, words)) > room:
            pieces: list[tuple[int, int]] = []
            for (start, end), cost in zip(words, costs, strict=True):
                middle = (start + end) // 2
                if cost <= room:
                    pieces.append((start, end))
                elif middle > start:
                    pieces += [(start, middle), (middle, end)]
                else:
                    raise self._too_long(
                        index, f"a character takes {cost} tokens, and the labels leave room for {room}"
                    )
            words = pieces
        return words, costs

    def _too_long(self, index: int, reason: str) -> InputTooLong:
        return too_long(self._tokenizer.card, f"the text is too long: {reason} - at `$.items[{index}].text`")

    def _count_words(self, text: str, words: Sequence[tuple[int, int]]) -> list[int]:
        """Return how many tokens each word has on its own, tokenised as the library does it."""
        pieces = [text[start:end] for start, end in words]
        if self._rule.library == "gliner2":  # which reads texts in lower case
            pieces = [piece.lower() for piece in pieces]
        # A batch of one, because `encode` would block the event loop.
        (encoding,) = self._tokenizer.backend.encode_batch([pieces], is_pretokenized=True, add_special_tokens=False)
        numbers = np.array([number for number in encoding.word_ids if number is not None], np.intp)
        return np.bincount(numbers, minlength=len(words)).tolist()


def _best(relations: Sequence[Relation]) -> list[Relation]:
    """Return each relation once, with its highest score."""
    best: dict[tuple[str, str, str], Relation] = {}
    for relation in relations:
        key = (relation.head, relation.tail, relation.relation)
        if key not in best or relation.score > best[key].score:
            best[key] = relation
    return list(best.values())
