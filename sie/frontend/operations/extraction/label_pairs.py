"""Prepares and reads zero-shot classification by entailment. Each text with each label is one pair.

Matches ZeroShotClassificationPipeline of transformers 5. Only the text is ever cut, never the sentence with the label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from sie.frontend.inputs.pair_cuts import Cuts, cut_tokens
from sie.frontend.inputs.pairs import Arrays, pack_encodings
from sie.frontend.inputs.text_bounds import groups
from sie.frontend.inputs.tokenize import Tokenizer, too_long, unicode_error
from sie.values.errors import BadRequest
from sie.values.extract import Classification, Extraction, ExtractTask, ZeroShot

_DEFAULT_TEMPLATE: Final = "This text is about {}."
_PLACE: Final = "{}"


def check_task(task: ExtractTask) -> None:
    """Raise BadRequest for a template without exactly one place for the label, or with other braces."""
    template = task.hypothesis_template
    if template is None:
        return
    if template.count(_PLACE) != 1:
        raise BadRequest(f"Option 'hypothesis_template' must hold '{{}}' once, got {template!r}")
    if template.count("{") + template.count("}") != len(_PLACE):
        raise BadRequest(f"Option 'hypothesis_template' must hold no brace beside its '{{}}', got {template!r}")


class PairReading:
    """Prepares and reads one request; its work has one item for each text and label."""

    def __init__(self, rule: ZeroShot, task: ExtractTask, tokenizer: Tokenizer) -> None:
        self._rule = rule
        self._task = task
        self._tokenizer = tokenizer
        self.cuts: Cuts = {}

    def prepare(self, texts: Sequence[str]) -> Arrays:
        """Return the arrays of the request's extent. Raises BadRequest, InputTooLong with overflow_policy `error`."""
        template = self._task.hypothesis_template or _DEFAULT_TEMPLATE
        premises = self._encode(texts)
        hypotheses = [*self._encode([template.replace(_PLACE, label) for label in self._task.labels])]
        pairs = (
            self._join(premise, hypothesis, item, place)
            for item, premise in enumerate(premises)
            for place, hypothesis in enumerate(hypotheses)
        )
        return pack_encodings(pairs, has_types=self._rule.token_types)

    def read(self, pieces: Sequence[NDArray[Any]]) -> list[Extraction]:
        """Return each text's labels, best first; pieces are the pairs' logits (classes,) float32."""
        labels, rule, threshold = self._task.labels, self._rule, self._task.threshold
        logits = np.stack(pieces).reshape(-1, len(labels), len(rule.labels))
        if self._task.multi_label or len(labels) == 1:
            scores = _softmax(logits[..., [rule.contradiction, rule.entailment]])[..., 1]
        else:
            scores = _softmax(logits[..., rule.entailment])
        found: list[Extraction] = []
        for row in scores.tolist():
            best_first = sorted(zip(labels, row, strict=True), key=lambda pair: -pair[1])
            kept = [Classification(*pair) for pair in best_first if threshold is None or pair[1] >= threshold]
            found.append(Extraction(classifications=kept))
        return found

    def _encode(self, texts: Sequence[str]) -> Iterator[tokenizers.Encoding]:
        """Yield the tokens of each text, without special ones, or more than the model reads of a long one."""
        library, card = self._tokenizer.backend, self._tokenizer.card
        try:
            heads = self._tokenizer.shorten(texts, card.max_sequence_length, side=card.truncation_side)
            for part in groups(heads):
                yield from library.encode_batch_fast(part, add_special_tokens=False)
        except TypeError as error:
            raise unicode_error(texts, error) from None

    def _join(
        self, premise: tokenizers.Encoding, hypothesis: tokenizers.Encoding, item: int, place: int
    ) -> tokenizers.Encoding:
        """Return a pair as the tokenizer joins two texts, cut to the model's limit."""
        library, card = self._tokenizer.backend, self._tokenizer.card
        limit = card.max_sequence_length
        if limit is not None:
            room = limit - len(hypothesis) - library.num_special_tokens_to_add(True)
            if room < 1:
                raise too_long(
                    card,
                    f"the label leaves no room for a text in the {limit} tokens that the model reads "
                    f"- at `$.params.labels[{place}]`",
                )
            if len(premise) > room:
                if self._task.overflow_policy == "error":
                    raise too_long(
                        card,
                        f"more than the {room} tokens that the model reads beside label {place} "
                        f"- at `$.items[{item}].text`",
                    )
                self.cuts[item] = room
                premise = tokenizers.Encoding.merge([premise], growing_offsets=False)  # a copy: it is cut in place
                cut_tokens(premise, room, card.truncation_side)
        return library.post_process(premise, hypothesis, True)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the softmax over the last axis."""
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)
