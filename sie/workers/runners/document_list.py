"""Runs a reranker that reads all documents of a query as a list: the score of each is its cosine with the query.

The hidden state at the mark behind a text becomes the text's vector. Source: jina-reranker-v3, arXiv 2509.25085, and its
modeling.py for documents of several lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sie.values.card import ModelCard
from sie.workers.device.device import read
from sie.workers.model_api import RowStep, Side, StepOutputs
from sie.workers.packed.batch import pack_sequences
from sie.workers.runners.encode import Backbone, Execution, weight_bytes

_LEAST_WEIGHT = 1e-12
Floats = NDArray[np.float32]


class _Vectors(NamedTuple):
    """The vectors of one list: those of its documents (n, d), and that of its query (d,)."""

    documents: Floats
    query: Floats


class ListScoreRunner:
    """A loaded reranker of lists. Built by `sie.workers.loading.loader`; used by one thread at a time."""

    def __init__(
        self, card: ModelCard, backbone: Backbone, projector: nn.Sequential, execution: Execution, dtype: str
    ) -> None:
        assert card.listwise is not None
        self.card = card
        self.execution = execution
        self.dtype = dtype
        """Format of the weights: float32, bfloat16, float16 or int8."""
        self.memory_bytes = weight_bytes((*backbone.model.parameters(), *projector.parameters())) + backbone.extra_bytes
        self._backbone = backbone
        self._projector = projector
        self._form = card.listwise

    def run(self, step: RowStep) -> StepOutputs:
        """Return the scores of a step; see `RowRunner`. The query of a comparison is its lists, back to back."""
        return StepOutputs(scores=self.run_lists(step.inputs, cast("Sequence[Side]", step.wants)))

    def run_lists(self, inputs: Sequence[NDArray[np.int32]], sides: Sequence[Side]) -> Floats:
        """Return (n, 1) scores, 0 for the lists themselves; the input of a document is its number (1,).

        Raises the errors of `Backbone.check`.
        """
        leaders = [item for item, side in enumerate(sides) if side.is_query]
        lists = [self._split(inputs[item]) for item in leaders]
        vectors = iter(self._vectors([own for found in lists for own in found]) if lists else [])
        for item, found in zip(leaders, lists, strict=True):
            sides[item].comparison.query = _scores([next(vectors) for _ in found])
        scores = np.zeros((len(inputs), 1), np.float32)
        for item, side in enumerate(sides):
            if not side.is_query:
                scores[item] = side.comparison.query[inputs[item][0]]
        return scores

    def _split(self, ids: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Return the lists of a request, each of which ends with the mark of its query."""
        ends = (ids == self._form.query_mark).nonzero()[0] + 1
        return np.split(ids, ends[:-1])

    def _vectors(self, lists: Sequence[NDArray[np.int32]]) -> list[_Vectors]:
        """Run all lists at once, and return the vectors of each."""
        batch = pack_sequences(lists)
        self._backbone.check(self.card.id, batch)
        marks = np.isin(batch.input_ids, (self._form.document_mark, self._form.query_mark)).nonzero()[0]
        with torch.inference_mode():
            hidden = self._backbone.run(batch, self.execution)
            rows = self._projector(hidden[self._backbone.move(marks)].float())
        own = np.split(read(rows).numpy(), np.searchsorted(marks, batch.cu_seqlens[1:-1]))
        placed = dict(zip(batch.order.tolist(), own, strict=True))
        return [_Vectors(placed[item][:-1], placed[item][-1]) for item in range(len(lists))]


def _scores(lists: Sequence[_Vectors]) -> Floats:
    """Return the score of each document of a request, in order.

    With several lists, the query's vector is the mean of theirs, weighted by their best documents' scores.
    """
    found = [_cosines(own.documents, own.query) for own in lists]
    if len(lists) == 1:
        return found[0]
    weights = np.array([(1 + scores.max()) / 2 for scores in found])
    shares = weights / max(weights.sum(), _LEAST_WEIGHT)
    query: Floats = shares.astype(np.float32) @ np.stack([own.query for own in lists])
    return np.concatenate([_cosines(own.documents, query) for own in lists])


def _cosines(documents: Floats, query: Floats) -> Floats:
    lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    return (documents @ query / np.maximum(lengths, _LEAST_WEIGHT)).astype(np.float32)
