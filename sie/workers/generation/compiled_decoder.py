"""Runs a decoder of the Llama kind as one call of the compiled library for each step (`sie.native.decoder`).

It uses the packed weights of the model's own layers, and the keys and values of its `PagedCache`. It copies neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.native.decoder import Decoder, DecoderLayer, DecoderStep, Screen, decoder_scratch_bytes, run_decoder
from sie.native.encoder import empty_aligned
from sie.native.linear import WeightFormat
from sie.native.team import num_threads
from sie.workers.generation.decoder_parts import DecoderParts, LayerParts
from sie.workers.generation.head_screen import HeadScreen
from sie.workers.generation.norms import CompiledNorm
from sie.workers.generation.paged_cache import LayerCache, PagedCache, Rule
from sie.workers.model_api import Slot
from sie.workers.packed.rotary_tables import RotaryTable, point_to_tables

_LEAST_INPUTS = 64
"""Of a rounded head, which keeps 32 inputs as they are."""
_LEAST_SHARE = 0.2
"""Of the weights: a smaller head is not worth half of its memory more."""


class ObservedForms(NamedTuple):
    """Facts seen in a forward pass: layers' scoring rules and rotary tables, the embeddings' scale, and the head's input."""

    rules: Sequence[Rule]
    tables: Sequence[RotaryTable | None]
    embedding_scale: float
    last: Tensor


class StepArrays(NamedTuple):
    """A step's inputs in the forms of `DecoderStep`."""

    ids: NDArray[np.int32]
    blocks: NDArray[np.int32]
    slots: NDArray[np.int64]
    kept: NDArray[np.int32]


class StepResult(NamedTuple):
    """The addresses of what a step writes, and of the tokens that `best` leaves out; fields of `DecoderStep`."""

    logits: int | None = None
    best: int | None = None
    hidden: int | None = None
    hidden_ends: int | None = None


class CompiledDecoder:
    """Holds a model's C structs and runs steps on them. Used by one thread at a time."""

    def __init__(self, model: Any, parts: DecoderParts, cache: PagedCache, seen: ObservedForms) -> None:
        """Take a model that `choose_decoder` has checked; cache and parts list the same layers in the same order."""
        self._kept = (model, parts, cache)
        self._tables = seen.tables
        self._vocabulary = parts.head.out_features
        num_keys, head = cache.layers[0].keys.shape[2:]
        table = next((table for table in seen.tables if table is not None), None)
        self._layers = (DecoderLayer * len(parts.layers))(
            *(
                _record(layer, layer_cache, rule)
                for layer, layer_cache, rule in zip(parts.layers, cache.layers, seen.rules, strict=True)
            )
        )
        matrices = [parts.head.matrix, *(m for one in self._layers for m in (one.qkv, one.out, one.up, one.down))]
        self._num_weights = sum(matrix.inputs * matrix.outputs for matrix in matrices)
        self.screen = HeadScreen(parts.head, seen.last) if _takes_screen(parts, cache, self._num_weights) else None
        self._record = Decoder(
            parts.embeddings.weight.data_ptr(),
            ctypes.cast(self._layers, ctypes.POINTER(DecoderLayer)),
            parts.norm.factors.data_ptr(),
            parts.head.matrix,
            Screen() if self.screen is None else self.screen.record,
            len(parts.layers), parts.embeddings.embedding_dim, parts.layers[0].out.in_features // head, num_keys, head,
            0 if table is None else table.cosines.shape[1],
            parts.activation, parts.is_gated, cache.block_tokens, cache.dtype == torch.bfloat16,
            seen.embedding_scale, parts.residual_scale, parts.logit_scale, parts.logit_cap, parts.norm.epsilon,
        )  # fmt: skip
        self._num_positions = point_to_tables(self._layers, self._tables)
        self._scratch = empty_aligned(0)
        self._logits = empty_aligned(0)

    def run(self, slots: Sequence[Slot]) -> Tensor:
        """Return the logits (k, vocabulary), float32, after each slot's `given_tokens.kept_tokens`.

        They are valid until the next run, which uses the memory again: this saves page faults. Ids must be in the
        vocabulary.
        Blocks are written and read only up to each slot's last token.
        """
        arrays = self._lay_out(slots)
        logits = self._room(len(arrays.kept))
        self._run(arrays, StepResult(logits=logits.data_ptr()))
        return logits

    def likeliest(self, slots: Sequence[Slot]) -> NDArray[np.int32]:
        """Return the likeliest token, the first of equals, of each slot with draws; -1 where logits are not finite.

        No slot may be scored. Tokens that a slot's first draw forbids are left out. No logits are stored.
        """
        arrays = self._lay_out(slots)
        hidden: list[int] = []
        ends: list[int] = []
        for slot in slots:
            if slot.draws:
                hidden += slot.draws[0].forbidden
                ends.append(len(hidden))
        left_out, left_out_ends = np.array(hidden, np.int32), np.array(ends, np.int32)
        best = np.empty(len(arrays.kept), np.int32)
        self._run(
            arrays,
            StepResult(best=best.ctypes.data, hidden=left_out.ctypes.data, hidden_ends=left_out_ends.ctypes.data),
        )
        return best

    def _lay_out(self, slots: Sequence[Slot]) -> StepArrays:
        block_tokens = self._record.block_tokens
        ids = slots[0].token_ids if len(slots) == 1 else np.concatenate([slot.token_ids for slot in slots])
        table: list[tuple[int, int, int, int]] = []
        blocks: list[int] = []
        kept: list[int] = []
        num_tokens = num_positions = 0
        for token_ids, start, own, draws, scored, *_ in slots:
            length = len(token_ids)
            table.append((start, length, num_tokens, len(blocks)))
            if scored is not None:
                kept += range(num_tokens + scored.first, num_tokens + scored.first + len(scored.targets))
            num_tokens += length
            end = start + length
            num_positions = max(num_positions, end)
            blocks += own[: (end - 1) // block_tokens + 1]
            if draws:
                kept.append(num_tokens - 1)
        if num_positions > self._num_positions:
            self._num_positions = point_to_tables(self._layers, self._tables, num_positions)
        return StepArrays(
            np.ascontiguousarray(ids, np.int32),
            np.array(blocks, np.int32),
            np.array(table, np.int64),
            np.array(kept, np.int32),
        )

    def _room(self, num_rows: int) -> Tensor:
        num_bytes = 4 * num_rows * self._vocabulary
        if len(self._logits) < num_bytes:
            self._logits = empty_aligned(num_bytes)
        return torch.from_numpy(self._logits[:num_bytes].view(np.float32)).view(num_rows, self._vocabulary)

    def _run(self, arrays: StepArrays, result: StepResult) -> None:
        ids, blocks, slots, kept = arrays
        threads = num_threads(torch.get_num_threads(), self._num_weights, len(ids))
        step = DecoderStep(
            ids.ctypes.data, blocks.ctypes.data, slots.ctypes.data, kept.ctypes.data, *result, None,
            len(ids), len(slots), len(kept), threads,
        )  # fmt: skip
        num_bytes = decoder_scratch_bytes(self._record, step)
        if len(self._scratch) < num_bytes:
            self._scratch = empty_aligned(num_bytes)
        step.scratch = self._scratch.ctypes.data
        run_decoder(self._record, step)


def _takes_screen(parts: DecoderParts, cache: PagedCache, num_weights: int) -> bool:
    """Return whether a rounded copy of the head saves a stream enough, and its bounds hold for the logits.

    A cap may make logits equal that are not.
    """
    matrix = parts.head.matrix
    is_exact = cache.dtype == torch.bfloat16 and matrix.format == WeightFormat.BF16 and not matrix.bias
    is_ordered = not parts.logit_cap and parts.logit_scale > 0
    is_wide = matrix.inputs >= _LEAST_INPUTS and matrix.inputs % 2 == 0
    return is_exact and is_ordered and is_wide and matrix.inputs * matrix.outputs > _LEAST_SHARE * num_weights


def _record(layer: LayerParts, cache: LayerCache, rule: Rule) -> DecoderLayer:
    norm = layer.query_norm
    return DecoderLayer(
        layer.qkv.matrix, layer.out.matrix, layer.up.matrix, layer.down.matrix,
        *map(_factors, layer.norms), _factors(norm), _factors(layer.key_norm), None, None,
        cache.keys.data_ptr(), cache.values.data_ptr(),
        rule.scaling, rule.softcap or 0.0, cache.window or 0, norm is not None and len(norm.factors) != cache.widths[0],
    )  # fmt: skip


def _factors(norm: CompiledNorm | None) -> int | None:
    return None if norm is None else norm.factors.data_ptr()
