"""Prepares and reads GLiClass classification: builds the model's input, and makes scores from its logits.

Labels, instruction, text and examples are one sequence, joined as gliclass 0.1.21 does it (pipeline.py,
`prepare_input`, `format_examples_prompt`). Each label group is a separate sequence. Source: SIE API reference,
sections 11, 12 and 19.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.text_bounds import groups
from sie.frontend.inputs.tokenize import Tokenizer, pack_ids, too_long, unicode_error
from sie.values.errors import BadRequest, Internal
from sie.values.extract import Classification, Extraction, ExtractTask, Gliclass, LabelGroup

_LABEL: Final = "<<LABEL>>"
_SEPARATOR: Final = "<<SEP>>"
_EXAMPLE: Final = "<<EXAMPLE>>"
_MARKERS: Final = (_LABEL, _SEPARATOR, _EXAMPLE)
_TYPES: Final = ("multi-label", "single-label")
_LEAST_CHOICES: Final = 2
_EVEN: Final = 0.5
"""The minimum score of a selected label in a multi-label group when the request has no threshold."""


def check_task(rule: Gliclass, task: ExtractTask) -> None:
    """Raise BadRequest for an invalid classification type, group or example, and for a marker in a text."""
    if task.label_groups and task.labels:
        raise BadRequest("Send 'labels' or 'label_groups', not both")
    check_groups(task)
    groups = _groups_of(task)
    for group in groups:
        if rule.max_labels is not None and len(group.labels) > rule.max_labels:
            raise BadRequest(f"The model reads at most {rule.max_labels} labels at once, got {len(group.labels)}")
    _check_examples(task, groups)
    fixed = [label for group in groups for label in group.labels]
    fixed += [task.instruction or "", *(example.text for example in task.examples)]
    if any(marker in text for text in fixed for marker in _MARKERS):
        raise BadRequest(f"Labels, instruction and examples must not hold any of {', '.join(_MARKERS)}")


def check_groups(task: ExtractTask) -> None:
    """Raise BadRequest for an invalid classification type or group."""
    if task.classification_type not in (None, *_TYPES):
        raise BadRequest(f"Invalid classification_type {task.classification_type!r}. Valid: {list(_TYPES)}")
    for group in task.label_groups:
        _check_group(group, is_single=task.classification_type != "multi-label")


def _groups_of(task: ExtractTask) -> tuple[LabelGroup, ...]:
    """Return the request's groups, or one unnamed group with its labels, without duplicates."""
    return task.label_groups or (LabelGroup("", tuple(dict.fromkeys(task.labels))),)


def _check_group(group: LabelGroup, *, is_single: bool) -> None:
    where = f"`$.params.options.label_groups[{group.name!r}]`"
    if not group.name.strip() or not group.labels or not all(label.strip() for label in group.labels):
        raise BadRequest(f"A label group must have a name and labels that are not blank - at {where}")
    if len(set(group.labels)) < len(group.labels):
        raise BadRequest(f"The labels of a group must differ - at {where}")
    if is_single and len(group.labels) < _LEAST_CHOICES:
        raise BadRequest(f"A single-label group needs two labels - at {where}")


def _check_examples(task: ExtractTask, groups: Sequence[LabelGroup]) -> None:
    known = {name for group in groups for name in _example_names(group)}
    for index, example in enumerate(task.examples):
        unknown = sorted(set(example.labels) - known)
        if unknown:
            raise BadRequest(
                f"An example has labels that the request does not have: {unknown} - at `$.params.options.examples[{index}]`"
            )


def _example_names(group: LabelGroup) -> dict[str, str]:
    """Map each label's name in examples to the label: `group.label`, or the plain label without groups."""
    return {f"{group.name}.{label}" if group.name else label: label for label in group.labels}


class LabelReading:
    """Prepares and reads one request; its work has one item for each text and group."""

    def __init__(self, rule: Gliclass, task: ExtractTask, tokenizer: Tokenizer, limits: Limits) -> None:
        self._rule = rule
        self._task = task
        self._tokenizer = tokenizer
        self._groups = _groups_of(task)
        self._max_chars = limits.max_body_bytes
        self._max_tokens = tokenizer.card.max_sequence_length
        self.cuts: Cuts = {}

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent.

        Raises BadRequest for a blank text, for a text with a marker of the model, and for more characters than
        `max_body_bytes`. Raises InputTooLong when the labels do not fit in a sequence, and for a text that is too long
        under the overflow_policy `error`.
        """
        for index, text in enumerate(texts):
            if not text.strip():
                raise BadRequest(f"A text must not be blank - at `$.items[{index}].text`")
            if _LABEL in text:
                raise BadRequest(f"A text must not hold {_LABEL} - at `$.items[{index}].text`")
        frames = [self._frame(group) for group in self._groups]
        try:
            heads = self._tokenizer.shorten(texts, self._max_tokens, side="right")
            self._check_size(heads, frames)
            token_ids, cu_seqlens = pack_ids(self._read(heads, frames))
        except TypeError as error:
            raise unicode_error((*texts, *("".join(frame) for frame in frames)), error) from None
        return [("cu_seqlens", cu_seqlens), ("token_ids", token_ids)]

    def _read(self, heads: Sequence[str], frames: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Return the token ids of each text with each frame; heads are the beginnings of texts that are read."""
        rows: list[list[int]] = []
        for part in groups([before + head + behind for head in heads for before, behind in frames]):
            for encoding in self._tokenizer.backend.encode_batch(part):
                index, group = divmod(len(rows), len(frames))
                start = len(frames[group][0])
                ids = self._fit(index, encoding, start, start + len(heads[index]))
                self._check_labels(index, ids, len(self._groups[group].labels))
                rows.append(ids)
        return rows

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return the scores of each text; pieces are (labels, 1) float32 logits, one for each text and group."""
        step = len(self._groups)
        return [self._read_text(pieces[first : first + step]) for first in range(0, len(pieces), step)]

    def _frame(self, group: LabelGroup) -> tuple[str, str]:
        """Return the prompt parts before and after a text."""
        labels = "".join(_LABEL + label for label in group.labels) + _SEPARATOR + (self._task.instruction or "")
        names = _example_names(group)
        examples = "".join(
            f"{_EXAMPLE}{example.text} \nLabels:\n {', '.join(names[name] for name in example.labels if name in names)}"
            for example in self._task.examples
        )
        examples += _SEPARATOR if examples else ""
        return (labels, examples) if self._rule.prompt_first else ("", labels + examples)

    def _check_size(self, texts: Sequence[str], frames: Sequence[tuple[str, str]]) -> None:
        """Raise BadRequest for more text than a body may hold; each text is joined with each group."""
        frame_chars = sum(len(before) + len(behind) for before, behind in frames)
        num_chars = len(frames) * sum(map(len, texts)) + len(texts) * frame_chars
        if num_chars > self._max_chars:
            raise BadRequest(
                f"The texts, each with the labels of every group, have {num_chars} characters to read, over "
                f"max_body_bytes ({self._max_chars}); split the request"
            )

    def _fit(self, index: int, encoding: tokenizers.Encoding, start: int, end: int) -> list[int]:
        """Return a sequence's token ids, cut as overflow_policy says. The text is its code points start to end."""
        ids, limit = encoding.ids, self._max_tokens
        if limit is None or len(ids) <= limit:
            return ids
        excess, policy = len(ids) - limit, self._task.overflow_policy
        self.cuts[index] = limit
        own = [number for number, (a, b) in enumerate(encoding.offsets) if start <= a < b <= end]
        if policy == "truncate_text" and excess < len(own):
            behind = own[-1] + 1
            return ids[: behind - excess] + ids[behind:]
        if policy != "default":
            raise too_long(
                self._tokenizer.card,
                f"more than the {limit} tokens that the model reads, with {len(ids) - len(own)} that are not the text's "
                f"- at `$.items[{index}].text`",
            )
        num_behind = encoding.special_tokens_mask[::-1].index(0)
        return [*ids[: limit - num_behind], *ids[len(ids) - num_behind :]]

    def _check_labels(self, index: int, ids: list[int], num_labels: int) -> None:
        found = ids.count(self._rule.label_token_id)
        if found > num_labels:  # a normaliser turned other characters into the marker
            raise BadRequest(f"A text must not hold {_LABEL} - at `$.items[{index}].text`")
        if found < num_labels:
            raise too_long(
                self._tokenizer.card,
                f"the labels do not fit in the {self._max_tokens} tokens that the model reads; send fewer or "
                f"shorter labels, a shorter text, or overflow_policy 'truncate_text' - at `$.items[{index}]`",
            )

    def _read_text(self, pieces: Sequence[NDArray[Any]]) -> Extraction:
        is_single = self._task.classification_type != "multi-label"
        scores = [
            _scores_of(group, piece, is_single=is_single) for group, piece in zip(self._groups, pieces, strict=True)
        ]
        return answer_groups(self._task, self._groups, scores)


def answer_groups(
    task: ExtractTask, groups: Sequence[LabelGroup], scores_by_group: Sequence[Sequence[float]]
) -> Extraction:
    """Return a text's answer from the scores of each group's labels: sorted classes, and `data` for named groups."""
    is_single, threshold = task.classification_type != "multi-label", task.threshold or 0.0
    classifications: list[Classification] = []
    answers: dict[str, Any] = {}
    for group, own in zip(groups, scores_by_group, strict=True):
        scores = dict(zip(group.labels, own, strict=True))
        names = _example_names(group).items()
        classifications += [Classification(name, scores[label]) for name, label in names]
        if group.name:
            answers[group.name] = _choice(scores) if is_single else _selection(scores, threshold or _EVEN)
    kept = [one for one in classifications if one.score >= threshold]
    return Extraction(classifications=sorted(kept, key=lambda one: -one.score), data=answers)


def _scores_of(group: LabelGroup, piece: NDArray[Any], *, is_single: bool) -> list[float]:
    """Return the score of each label: a softmax, or sigmoids when labels do not compete (one label, multi-label)."""
    logits = piece.astype(np.float64).reshape(-1)
    if len(logits) != len(group.labels):
        raise Internal("the worker's reply has another shape than the request")
    if is_single and len(logits) > 1:
        powers = np.exp(logits - logits.max())
        return (powers / powers.sum()).tolist()
    return (0.5 * (1 + np.tanh(logits / 2))).tolist()


def _choice(scores: dict[str, float]) -> dict[str, Any]:
    """Return a single-label group's answer; confidence is 1 for a certain choice and 0 for equal scores."""
    entropy = -sum(score * math.log(score) for score in scores.values() if score > 0)
    return {
        "type": "choice",
        "choice": max(scores, key=scores.__getitem__),
        "probabilities": scores,
        "confidence": 1 - entropy / math.log(len(scores)),
    }


def _selection(scores: dict[str, float], threshold: float) -> dict[str, Any]:
    return {"labels": [label for label, score in scores.items() if score >= threshold], "probabilities": scores}
