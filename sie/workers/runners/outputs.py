"""Runs models with outputs besides dense: one forward pass for a step, then the head of each output.

If a model has a table of query weights (`StaticQueries`), its queries do not run through the transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.values.card import ModelCard
from sie.values.output_kinds import RAGGED
from sie.workers.device.device import move
from sie.workers.model_api import RowStep, Side, StepOutputs, Want
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.runners.compare import TextVectors, compare
from sie.workers.runners.encode import Backbone, Execution, launch_rows, lora_adapters, weight_bytes
from sie.workers.runners.head import Head
from sie.workers.runners.splade import Entries, SparseHead, StaticTable
from sie.workers.runners.tokens import QueryExpansion, TokenHead

T = TypeVar("T")
_NO_ENTRIES: Entries = (np.empty(0, np.int32), np.empty(0, np.float32))


class Heads(NamedTuple):
    """The heads that a model applies to its hidden states; None for an output that it does not have."""

    dense: Head | None = None
    sparse: SparseHead | None = None
    multivector: TokenHead | None = None
    expansion: QueryExpansion | None = None
    static_queries: StaticTable | None = None


class OutputsRunner:
    """A loaded model with several outputs, or one that is not dense. Built by `sie.workers.loading.loader`."""

    def __init__(self, card: ModelCard, backbone: Backbone, heads: Heads, execution: Execution, dtype: str) -> None:
        self.card = card
        self.execution = execution
        self.dtype = dtype
        """Format of the weights: float32, bfloat16 or float16."""
        self._backbone = backbone
        self._heads = heads
        self.adapters = lora_adapters(backbone, execution)
        sparse = () if heads.sparse is None else heads.sparse.weights()
        others = (heads.dense, heads.multivector, heads.static_queries)
        self.memory_bytes = weight_bytes((*backbone.model.parameters(), *sparse)) + backbone.extra_bytes
        self.memory_bytes += sum(head.memory_bytes for head in others if head is not None)

    def run(self, step: RowStep) -> StepOutputs:
        """Return the outputs that each item requests, or the scores of a comparison; see `RowRunner`."""
        if step.operation == "compare":
            return StepOutputs(scores=self.run_comparisons(step.inputs, cast("Sequence[Side]", step.wants)))
        return self.run_wants(step.inputs, step.wants, step.loras)

    @property
    def works_ahead(self) -> bool:
        """Whether some steps can begin before the one before has been read; see `AheadRunner`."""
        return self._backbone.device.type == "cuda" and not self.adapters and not self.execution.pads

    def launch(self, step: RowStep) -> Callable[[], StepOutputs] | None:
        """Begin a step; None for a comparison, and for sparse outputs whose sizes the host has to wait for."""
        sparse = self._heads.sparse
        must_wait = sparse is not None and not sparse.can_launch and _wanted("sparse", step.wants)
        if step.operation == "compare" or must_wait:
            return None
        return self._launch_wants(step.inputs, step.wants, step.loras)

    def run_wants(
        self, inputs: Sequence[NDArray[np.int32]], wants: Sequence[Want], loras: Sequence[str] = ()
    ) -> StepOutputs:
        """Return the outputs that each input (t_i,) requests; one without tokens gives zeros, no entries, no vectors.

        loras is empty if no item has an adapter. Otherwise it has one name for each item, empty for no adapter.

        Raises the errors of `Backbone.check`, and NonFinite.
        """
        return self._launch_wants(inputs, wants, loras)()

    def _launch_wants(
        self, inputs: Sequence[NDArray[np.int32]], wants: Sequence[Want], loras: Sequence[str]
    ) -> Callable[[], StepOutputs]:
        """Begin what `run_wants` does."""
        table, filled = self._heads.static_queries, self._filled(inputs, wants)
        looked_up = [item for item, want in enumerate(wants) if table is not None and want.is_query]
        run = [item for item in range(len(inputs)) if len(filled[item][0]) and item not in looked_up]
        if len(run) == len(inputs):
            return self._launch_all(filled, wants, loras)
        own_loras = [loras[item] for item in run] if loras else ()
        own = [filled[item] for item in run], [wants[item] for item in run], own_loras
        wait = self._launch_all(*own) if run else StepOutputs

        def finish() -> StepOutputs:
            spread = self._spread(wait(), run, wants)
            if table is not None and "sparse" in spread.ragged:
                sparse = list(spread.ragged["sparse"])
                for item in looked_up:
                    sparse[item] = table(inputs[item])
                spread = spread._replace(ragged={**spread.ragged, "sparse": sparse})
            return spread

        return finish

    def _filled(
        self, inputs: Sequence[NDArray[np.int32]], wants: Sequence[Want]
    ) -> list[tuple[NDArray[np.int32], int]]:
        """Return each input's tokens, with short queries padded, and how many of the tokens are attended to."""
        expand = self._heads.expansion
        return [
            expand(ids, want.expand_to) if expand is not None and want.is_query else (ids, len(ids))
            for ids, want in zip(inputs, wants, strict=True)
        ]

    def _spread(self, outputs: StepOutputs, run: list[int], wants: Sequence[Want]) -> StepOutputs:
        """Return the outputs of the items that ran, with empty outputs for the others."""
        dims, num_items = self.card.dims, len(wants)
        dense = None
        if _wanted("dense", wants):
            dense = np.zeros((num_items, dims["dense"]), np.float32)
            if outputs.dense is not None:
                dense[run] = outputs.dense
        ragged: dict[str, list[Any]] = {}
        for output, kind in RAGGED.items():
            if wanted := _wanted(output, wants):
                empty = _NO_ENTRIES if kind.rounding == "weights" else np.empty((0, dims[output]), np.float32)
                spread = ragged[output] = [empty if item in wanted else None for item in range(num_items)]
                for item, value in zip(run, outputs.ragged.get(output, ()), strict=False):
                    spread[item] = value
        return StepOutputs(dense, ragged)

    def _launch_all(
        self, filled: Sequence[tuple[NDArray[np.int32], int]], wants: Sequence[Want], loras: Sequence[str]
    ) -> Callable[[], StepOutputs]:
        """Begin to run the transformer over all inputs at once; none is empty."""
        head = self._heads.multivector
        with torch.inference_mode():
            hidden, batch = self._hidden(filled, loras)
            sparse = self._sparse(hidden, batch, wants)
            vectors = None if head is None else self._vectors(head.launch, hidden, batch, wants)
            dense = self._dense(hidden, batch, wants)

        def finish() -> StepOutputs:
            ragged = {
                output: wait() for output, wait in (("sparse", sparse), ("multivector", vectors)) if wait is not None
            }
            return StepOutputs(None if dense is None else dense(), ragged)

        return finish

    def _hidden(
        self, filled: Sequence[tuple[NDArray[np.int32], int]], loras: Sequence[str] = ()
    ) -> tuple[Tensor, PackedBatch]:
        seen = None if self._heads.expansion is None else np.array([count for _, count in filled], np.int32)
        batch = pack_sequences([ids for ids, _ in filled], attended=seen)
        self._backbone.check(self.card.id, batch)
        with self._backbone.lora_rows.step(loras, batch):
            return self._backbone.run(batch, self.execution), batch

    def run_comparisons(self, inputs: Sequence[NDArray[np.int32]], sides: Sequence[Side]) -> NDArray[np.float32]:
        """Return (n, 1) scores; see the protocol. Vectors stay on the device. Raises the errors of `run_wants`."""
        filled = self._filled(inputs, sides)
        run = [item for item in range(len(inputs)) if len(filled[item][0])]
        with torch.inference_mode():
            found = [self._no_vectors()] * len(inputs)
            if run:
                vectors = self._run_vectors([filled[item] for item in run], [sides[item] for item in run])
                for item, own in zip(run, vectors, strict=True):
                    found[item] = own
            return compare(found, sides, self.card.late, self._backbone.device)[:, None]

    def _no_vectors(self) -> TextVectors:
        """Return the vectors of a text without tokens."""
        dims, device = self.card.dims, self._backbone.device
        dense = torch.zeros(dims.get("dense", 0), device=device)
        return TextVectors(dense, _NO_ENTRIES, torch.empty((0, dims.get("multivector", 0)), device=device))

    def _run_vectors(
        self, filled: Sequence[tuple[NDArray[np.int32], int]], sides: Sequence[Side]
    ) -> Iterable[TextVectors]:
        hidden, batch = self._hidden(filled)
        nothing: list[None] = [None] * len(sides)
        dense, token_head = None, self._heads.multivector
        if self._heads.dense is not None and (wanted := _wanted("dense", sides)):
            rows = self._heads.dense(hidden, self._backbone.move(batch.cu_seqlens))
            dense = _place([row for item, row in zip(batch.order, rows, strict=True) if item in wanted], batch, wanted)
        vectors = None if token_head is None else self._vectors(token_head.launch_tensors, hidden, batch, sides)
        sparse = self._sparse(hidden, batch, sides)
        found = (nothing if wait is None else wait() for wait in (sparse, vectors))
        return map(TextVectors, dense or nothing, *found)

    def _dense(
        self, hidden: Tensor, batch: PackedBatch, wants: Sequence[Want]
    ) -> Callable[[], NDArray[np.float32]] | None:
        head = self._heads.dense
        if head is None or not _wanted("dense", wants):
            return None
        return launch_rows(head, hidden, batch)

    def _sparse(
        self, hidden: Tensor, batch: PackedBatch, wants: Sequence[Want]
    ) -> Callable[[], list[Entries | None]] | None:
        """Begin the entries of each item that requests them."""
        head = self._heads.sparse
        if head is None or not (wanted := _wanted("sparse", wants)):
            return None
        wait = head.launch(*_select(hidden, batch, wanted))
        return lambda: _place(wait(), batch, wanted)

    def _vectors(
        self, launch: Callable[..., Callable[[], list[T]]], hidden: Tensor, batch: PackedBatch, wants: Sequence[Want]
    ) -> Callable[[], list[T | None]] | None:
        """Begin the rows of each item that requests them, in the form that `launch` gives: arrays or tensors."""
        if not (wanted := _wanted("multivector", wants)):
            return None
        own, sequences = _select(hidden, batch, wanted)
        is_query = np.array([wants[item].is_query for item in batch.order if item in wanted], np.bool_)
        wait = launch(own, sequences, is_query)
        return lambda: _place(wait(), batch, wanted)


def _wanted(output: str, wants: Sequence[Want]) -> set[int]:
    return {item for item, want in enumerate(wants) if output in want.output_types}


def _select(hidden: Tensor, batch: PackedBatch, wanted: set[int]) -> tuple[Tensor, PackedBatch]:
    """Return the hidden states of some sequences of a batch, in its order, as a separate batch.

    Only the new batch's input_ids and cu_seqlens are valid.
    """
    if len(wanted) == len(batch.order):
        return hidden, batch
    lengths = np.diff(batch.cu_seqlens)
    chosen = np.isin(batch.order, list(wanted))
    tokens = np.repeat(chosen, lengths).nonzero()[0]
    cu_seqlens = np.concatenate(([0], lengths[chosen].cumsum())).astype(np.int32)
    own = batch._replace(input_ids=batch.input_ids[tokens], cu_seqlens=cu_seqlens)
    return hidden[move(torch.from_numpy(tokens), hidden.device)], own


def _place(values: list[T], batch: PackedBatch, wanted: set[int]) -> list[T | None]:
    """Return one value for each item of the step, None for an item that requests none."""
    placed: list[T | None] = [None] * len(batch.order)
    for item, value in zip((item for item in batch.order if item in wanted), values, strict=True):
        placed[item] = value
    return placed
