"""Prepares and reads text classification: a score for each class of a text, or of a pair of texts.

Matches TextClassificationPipeline of transformers 5. A text over the model's limit is cut as its tokenizer cuts it, of
a pair the longer text first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sie.frontend.inputs.pair_cuts import Cuts, Lengths, cut_pairs
from sie.frontend.inputs.pairs import Arrays, pack_encodings
from sie.frontend.inputs.tokenize import Tokenizer, too_long, unicode_error
from sie.values.errors import BadRequest
from sie.values.extract import Classification, Extraction, ExtractTask, TextClassification


def check_task(model_id: str, rule: TextClassification, task: ExtractTask) -> None:
    """Raise BadRequest for an unknown label."""
    for label in task.labels:
        if label not in rule.labels:
            raise BadRequest(f"Model '{model_id}' has no label {label!r}. Available: {[*dict.fromkeys(rule.labels)]}")


class ClassReading:
    """Prepares and reads one request; its work has one item for each text or pair."""

    def __init__(
        self, rule: TextClassification, task: ExtractTask, tokenizer: Tokenizer, pairs: Mapping[int, str]
    ) -> None:
        """Prepare for a request; pairs has the second text of each item that is a pair."""
        self._rule = rule
        self._task = task
        self._tokenizer = tokenizer
        self._pairs = pairs
        limits = (tokenizer.card.max_sequence_length, task.max_tokens)
        self._limit = min((limit for limit in limits if limit is not None), default=None)
        self.cuts: Cuts = {}

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent.

        Raises BadRequest for invalid Unicode, a text without tokens or a limit without room. Raises InputTooLong with
        overflow_policy `error`.
        """
        encodings = (self._encode(item, text) for item, text in enumerate(texts))
        return pack_encodings(encodings, has_types=self._rule.token_types)

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return each text's classes, best first unless the task wants their order; pieces are logits (classes,)."""
        logits = np.stack(pieces).reshape(-1, len(self._rule.labels)).astype(np.float32)
        return [Extraction(classifications=self._choose(row)) for row in self._scores(logits).tolist()]

    def _scores(self, logits: NDArray[np.float32]) -> NDArray[Any]:
        match self._task.function_to_apply or self._rule.function:
            case "sigmoid":
                ends = np.exp(-np.abs(logits))  # at most 1, so that no logit overflows
                return np.where(logits >= 0, np.float32(1), ends) / (np.float32(1) + ends)
            case "softmax":
                exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
                return exponents / exponents.sum(axis=-1, keepdims=True)
            case _:
                return logits

    def _choose(self, scores: list[float]) -> list[Classification]:
        labels, threshold = self._task.labels, self._task.threshold
        found = list(map(Classification, self._rule.labels, scores))
        if self._task.by_class:
            return found
        kept = [
            one
            for one in found
            if (not labels or one.label in labels) and (threshold is None or one.score >= threshold)
        ]
        return sorted(kept, key=lambda one: -one.score)[: self._task.top_k]

    def _encode(self, item: int, text: str) -> tokenizers.Encoding:
        """Return a text or a pair as the tokenizer reads it, cut to the limit."""
        pair = self._pairs.get(item) or None  # transformers reads a text with an empty second one as a single text
        library = self._tokenizer.backend
        num_special = library.num_special_tokens_to_add(pair is not None)
        if self._limit is not None and self._limit <= num_special:
            raise BadRequest(f"A limit of {self._limit} tokens leaves no room beside the {num_special} special ones")
        texts = [text] if pair is None else [text, pair]
        try:
            heads = self._tokenizer.shorten(texts, self._limit, side=self._tokenizer.card.truncation_side)
            (encoding,) = library.encode_batch_fast([heads[0] if pair is None else (heads[0], heads[1])])
            if self._limit is not None and len(encoding) > self._limit:
                self._note_cut(item, self._limit)
                encoding = self._read_cut(library, heads, texts, self._limit)
        except TypeError as error:
            raise unicode_error(texts, error) from None
        if not len(encoding):
            raise BadRequest(f"Text {item} has no token to classify")
        return encoding

    def _read_cut(
        self, library: tokenizers.Tokenizer, heads: Sequence[str], texts: Sequence[str], limit: int
    ) -> tokenizers.Encoding:
        """Return one text or a pair with at most limit tokens; heads are what is read of the whole texts."""
        side = self._tokenizer.card.truncation_side
        if len(heads) > 1:
            return cut_pairs(library, heads[0], heads[1:], limit, {}, lengths=Lengths(library, texts), side=side)[0]
        (encoding,) = library.encode_batch_fast(heads, add_special_tokens=False)
        encoding.truncate(limit - library.num_special_tokens_to_add(False), direction=side)
        return library.post_process(encoding, None, True)

    def _note_cut(self, item: int, limit: int) -> None:
        if self._task.overflow_policy == "error":
            raise too_long(self._tokenizer.card, f"text {item} has more than the {limit} tokens that are read of it")
        self.cuts[item] = limit
