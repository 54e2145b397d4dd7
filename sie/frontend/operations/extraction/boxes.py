"""Prepares and reads object detection: turns labels into token ids, and boxes into objects of the image.

Source of prompts, defaults and labels: SIE API reference, section 19. Source of boxes: transformers 5.23,
post_process_grounded_object_detection in processing_owlv2.py and processing_grounding_dino.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sie.frontend.inputs.image_reader import ReadImages
from sie.frontend.inputs.pair_cuts import Cuts
from sie.frontend.inputs.pairs import Arrays
from sie.frontend.inputs.tokenize import Tokenizer, pack_ids, too_long, unicode_error
from sie.values.errors import BadRequest, Internal
from sie.values.extract import DetectedObject, Detection, Extraction, ExtractTask

_OWL_PROMPT: Final = "a photo of {}"
_OWL_THRESHOLD: Final = 0.1
_GROUNDING_THRESHOLD: Final = 0.25
_WORD: Final = re.compile(r"\w+")
_NUM_COORDINATES: Final = 5
"""Columns of the worker's answer before the columns of queries or tokens: score, centre, size."""


def check_task(model: str, rule: Detection, task: ExtractTask) -> None:
    """Raise BadRequest unless a Grounding DINO task has either labels or a text, not both."""
    if rule.needs_labels:
        return
    has_text = bool(task.instruction and task.instruction.strip())
    if not task.labels and not has_text:
        raise BadRequest(f"Model '{model}' needs labels, or an instruction in their place - at `$.params.labels`")
    if task.labels and has_text:
        raise BadRequest(f"Model '{model}' takes labels or an instruction, not both - at `$.params.instruction`")


def box_threshold(rule: Detection, task: ExtractTask) -> float:
    """Return the minimum score of a box."""
    if not rule.needs_labels:
        return _GROUNDING_THRESHOLD if task.box_threshold is None else task.box_threshold
    given = (score for score in (task.score_threshold, task.threshold) if score is not None)
    return next(given, _OWL_THRESHOLD)


class BoxReading:
    """Prepares and reads one request: the labels to look for in its images."""

    def __init__(self, rule: Detection, task: ExtractTask, tokenizer: Tokenizer) -> None:
        self._rule = rule
        self._task = task
        self._tokenizer = tokenizer
        self._encoding: tokenizers.Encoding | None = None
        self._spelled: list[str] = []
        """The labels as they are spelled in a phrase."""
        self._labels_of: dict[str, str | None] = {}
        """Cache of the nearest label of each phrase; many boxes share a phrase."""
        self._own_sizes: NDArray[np.int32] = np.empty((0, 2), np.int32)
        self.cuts: Cuts = {}
        """The labels that were cut."""

    @property
    def texts(self) -> list[str]:
        """The texts that the model reads, for `prepare`: a prompt for each label, or one text for all of them."""
        labels = [label.strip().lower() for label in self._task.labels]
        if self._rule.needs_labels:
            return [_OWL_PROMPT.format(label) for label in labels]
        if labels:
            return [" ".join(f"{label}." for label in labels)]
        text = (self._task.instruction or "").strip().lower()
        return [text if text.endswith(".") else f"{text}."]

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the queries.

        Raises BadRequest for invalid Unicode, InputTooLong when the model cannot read a query at once.
        """
        try:
            encodings = self._tokenizer.backend.encode_batch(texts)
        except TypeError as error:
            raise unicode_error(texts, error) from None
        limit = self._tokenizer.card.max_sequence_length
        if limit is not None:
            encodings = [
                encoding if len(encoding) <= limit else self._cut(text, len(encoding), limit, label)
                for label, (text, encoding) in enumerate(zip(texts, encodings, strict=True))
            ]
        if not self._rule.needs_labels:
            [self._encoding] = encodings
            self._spelled = self._spell([label.strip().lower() for label in self._task.labels])
        query_ids, query_offsets = pack_ids([encoding.ids for encoding in encodings])
        return [("query_ids", query_ids), ("query_offsets", query_offsets)]

    def see(self, images: ReadImages) -> None:
        """Keep the images' sizes, one image an item. Raises BadRequest for an image too thin for the model."""
        for item, (height, width) in enumerate(images.sizes.tolist()):
            if self._rule.count_places(height, width) < self._rule.num_boxes:
                raise BadRequest(
                    f"image is too thin: {width} x {height} pixels as the model sees it have fewer places than the "
                    f"{self._rule.num_boxes} boxes that it looks at - at `$.items[{item}].images[0].data`"
                )
        self._own_sizes = images.own_sizes

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return each image's objects, best first; pieces are its boxes (b, 5 + k) float32."""
        sizes: list[list[int]] = self._own_sizes.tolist()
        return [Extraction(objects=self._objects(rows, *size)) for rows, size in zip(pieces, sizes, strict=True)]

    def _objects(self, rows: NDArray[np.float32], height: int, width: int) -> list[DetectedObject]:
        if rows.ndim != 2 or rows.shape[1] <= _NUM_COORDINATES:
            raise Internal("the worker's reply has another shape than the request")
        rows = rows[np.argsort(-rows[:, 0], kind="stable")]
        side = max(height, width) if self._rule.family == "owlv2" else 0
        corners = _to_pixels(rows[:, 1:_NUM_COORDINATES], side or height, side or width)
        corners = np.clip(corners, 0, np.array([width, height, width, height], np.float32))
        objects: list[DetectedObject] = []
        for row, (left, top, right, bottom) in zip(rows, corners.tolist(), strict=True):
            if right > left and bottom > top:  # else the box lies in the padding that makes OWLv2's image square
                place = int(left), int(top), int(right - left), int(bottom - top)
                objects.append(DetectedObject(self._label(row[_NUM_COORDINATES:]), float(row[0]), place))
        return objects

    def _label(self, columns: NDArray[np.float32]) -> str:
        """Return the caller's label of a box, or the matched text if the request has no labels."""
        if self._rule.needs_labels:
            return self._task.labels[int(columns[0])]
        encoding, task = self._encoding, self._task
        if encoding is None or len(columns) != len(encoding.ids):
            raise Internal("the worker's reply has another shape than the request")
        least = _GROUNDING_THRESHOLD if task.text_threshold is None else task.text_threshold
        scores = columns.tolist()
        found = [place for place, score in enumerate(scores) if place and score > least]
        phrase: str = self._tokenizer.backend.decode([encoding.ids[place] for place in found])
        if not task.labels:
            return phrase.strip(" .")
        if phrase not in self._labels_of:
            nearest = _nearest(phrase, self._spelled)
            self._labels_of[phrase] = None if nearest is None else task.labels[nearest]
        return self._labels_of[phrase] or self._label_at(scores)

    def _spell(self, texts: Sequence[str]) -> list[str]:
        """Return texts as the tokenizer decodes them: perhaps without accents, or with spaces between characters."""
        encodings = self._tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        return [self._tokenizer.backend.decode(encoding.ids) for encoding in encodings]

    def _label_at(self, scores: list[float]) -> str:
        """Return the label whose part of the text contains the token with the highest score."""
        assert self._encoding is not None
        special = self._encoding.special_tokens_mask
        best = max(range(len(scores)), key=lambda place: -1.0 if special[place] else scores[place])
        start, end = self._encoding.offsets[best][0], 0
        for label in self._task.labels:
            end += len(label.strip().lower()) + len(". ")
            if start < end:
                return label
        return self._task.labels[-1]

    def _cut(self, text: str, num_tokens: int, limit: int, label: int) -> tokenizers.Encoding:
        """Return the prompt of a long label, cut to limit. Raises InputTooLong for a text of all labels."""
        if not self._rule.needs_labels:
            raise too_long(
                self._tokenizer.card,
                f"the text that is looked for has {num_tokens} tokens, and the model reads at most {limit} at "
                "once; split the labels over several requests - at `$.params.labels`",
            )
        if self._task.overflow_policy == "error":
            raise too_long(
                self._tokenizer.card,
                f"{num_tokens} tokens with their prompt, and the model reads at most {limit} "
                f"- at `$.params.labels[{label}]`",
            )
        self.cuts[label] = limit
        library = self._tokenizer.backend
        (short,) = library.encode_batch([text], add_special_tokens=False)  # `encode` would block the event loop
        short.truncate(limit - library.num_special_tokens_to_add(False))
        return library.post_process(short)


def _to_pixels(boxes: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Return (b, 4) left, top, right, bottom in pixels, from boxes as fractions of the image: centre x and y, size."""
    centres, halves = boxes[:, :2], boxes[:, 2:] / 2
    corners = np.concatenate([centres - halves, centres + halves], axis=1)
    return np.multiply(corners, (width, height, width, height), dtype=np.float32)


def _nearest(phrase: str, labels: Sequence[str]) -> int | None:
    """Return the index of the label with the largest fraction of its words in the phrase, then with the most in it.

    Of equal labels the first wins. Returns None when the phrase shares no word with any label.
    """
    found = set(_WORD.findall(phrase.lower()))
    best: tuple[float, int] = (0.0, 0)
    nearest: int | None = None
    for index, label in enumerate(labels):
        words = _WORD.findall(label.lower())
        shared = sum(word in found for word in words)
        if words and (shared / len(words), shared) > best:
            best, nearest = (shared / len(words), shared), index
    return nearest
