"""Runs a GLiREL model: takes the words and entities of texts, and returns the relations between the entities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.values.card import ModelCard
from sie.values.extract import Extraction, ExtractTask, Relation
from sie.values.glirel_items import RELATION_MARK, TEXT_MARK, GlirelItem
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.runners.encode import weight_bytes
from sie.workers.runners.glirel_model import GlirelModel, ReadText

_DEFAULT_THRESHOLD: Final = 0.3
_DEFAULT_TOP_K: Final = 10
_PAIRS_AT_ONCE: Final = 1024
"""Pairs of entities whose states are in memory together: 100 entities have 9,900 pairs, and took 1 GB at once."""
_decoder: Final = msgspec.json.Decoder(GlirelItem)


class GlirelRunner:
    """A loaded GLiREL model. Built by `sie.workers.loading.libraries`; used by one thread at a time."""

    def __init__(
        self,
        card: ModelCard,
        model: GlirelModel,
        tokenizer: tokenizers.Tokenizer,
        *,
        max_distance: int | None,
        dtype: str,
    ) -> None:
        """Take a model; max_distance is the most words between the starts of entities, or None for any."""
        self.card = card
        self.dtype = dtype
        """Format of the weights: float32, bfloat16 or float16."""
        self.memory_bytes = weight_bytes(model.parameters())
        self._model = model
        self._max_distance = max_distance
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device

    def run(self, step: RowStep) -> StepOutputs:
        """Return the extractions of a step; see `RowRunner`."""
        return StepOutputs(extract=self.run_extract(step.inputs, step.tasks))

    def run_extract(self, inputs: Sequence[NDArray[np.uint8]], tasks: Sequence[ExtractTask]) -> list[Extraction]:
        """Return each item's relations, whose ends are numbers of entities. Items run one after another."""
        return [
            Extraction(relations=self._relations(_decoder.decode(own.tobytes()), task))
            for own, task in zip(inputs, tasks, strict=True)
        ]

    def _relations(self, item: GlirelItem, task: ExtractTask) -> list[Relation]:
        if len(item.spans) < 2:
            return []
        labels = list(dict.fromkeys(task.labels))
        found: list[Relation] = []
        pairs = self._pairs(item.spans)
        with torch.inference_mode():
            read = self._read(item, labels)
            while some := list(islice(pairs, _PAIRS_AT_ONCE)):
                found += self._score(read, some, labels, task)
        return found

    def _pairs(self, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the pairs to score. Those with the first entity first have no limit of their distance, as in the library."""
        most = self._max_distance
        return (
            (head, tail)
            for head, (start, _) in enumerate(spans)
            for tail, (other, _) in enumerate(spans)
            if head < tail or (head != tail and (most is None or abs(start - other) <= most))
        )

    def _score(
        self, read: ReadText, pairs: Sequence[tuple[int, int]], labels: Sequence[str], task: ExtractTask
    ) -> list[Relation]:
        threshold = _DEFAULT_THRESHOLD if task.threshold is None else task.threshold
        most = task.top_k or _DEFAULT_TOP_K
        scores = torch.sigmoid(self._model.score(read, torch.tensor(pairs, device=self._device)))
        best = scores.sort(dim=1, descending=True, stable=True)
        values: list[list[float]] = best.values[:, :most].tolist()
        indices: list[list[int]] = best.indices[:, :most].tolist()
        return [
            Relation(str(head), str(tail), labels[number], score)
            for (head, tail), row, numbers in zip(pairs, values, indices, strict=True)
            for score, number in zip(row, numbers, strict=True)
            if score > threshold
        ]

    def _read(self, item: GlirelItem, labels: list[str]) -> ReadText:
        words = [word for label in labels for word in (RELATION_MARK, label)] + [TEXT_MARK, *item.words]
        encoding: Any = self._tokenizer.encode(words, is_pretokenized=True)
        places = np.zeros((len(words), 2), np.int64)
        for token, word in enumerate(encoding.word_ids):
            if word is not None:
                if not places[word, 1]:
                    places[word, 0] = token
                places[word, 1] = token + 1

        def move(values: Any) -> Tensor:
            return torch.tensor(values, device=self._device)

        return self._model.read(move(encoding.ids), move(places), len(labels), move(item.spans))
