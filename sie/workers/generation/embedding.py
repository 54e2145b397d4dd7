"""Computes a generating model's vectors: a packed step that does not store keys and values, then the pooling head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.values.card import ModelCard
from sie.workers.device.device import move
from sie.workers.generation.gathered import attend_one, band_mask
from sie.workers.generation.paged_cache import LayerCache, PagedCache, Rule
from sie.workers.packed.batch import PackedBatch, pack_sequences, token_lengths
from sie.workers.packed.flash import attend_flash, can_attend_flash
from sie.workers.packed.rotation import Rotations
from sie.workers.runners.encode import dense_rows
from sie.workers.runners.head import Head


class UnkeptStep:
    """Attention over whole sequences without any block; a `StepAttention`."""

    def __init__(self, batch: PackedBatch, device: torch.device) -> None:
        self._bounds = list(pairwise(batch.cu_seqlens.tolist()))
        self._cu_seqlens = move(torch.from_numpy(batch.cu_seqlens), device)
        self._longest = batch.max_length

    def attend(self, layer: LayerCache, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Attend within each sequence, as `StepAttention`, but store nothing."""
        is_plain = rule.softcap is None and rule.sinks is None
        if is_plain and can_attend_flash(query.device, query.dtype, layer.widths):
            return attend_flash(
                query, key, value, bounds=(self._cu_seqlens, self._cu_seqlens), longest=(self._longest, self._longest),
                scaling=rule.scaling, reach=(-1 if layer.window is None else layer.window - 1, 0),
            )  # fmt: skip
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        for first, last in self._bounds:
            rows = slice(first, last)
            is_band = layer.window is not None and layer.window < last - first
            mask = band_mask(last - first, layer.window, query) if is_band and layer.window else None
            out[rows] = attend_one(query[:, rows], key[:, rows], value[:, rows], mask, rule)
        return out


class Embedder:
    """Computes one vector for each sequence, with the model that generates."""

    def __init__(self, card: ModelCard, model: Any, cache: PagedCache, rotations: Rotations | None) -> None:
        """Take a model whose layers have their blocks in the cache."""
        self._rotations = rotations
        self._model = model.base_model
        self._cache = cache
        self._head = Head(card.id, card.pipeline, cache.device)
        self._width = card.dims["dense"]

    def run(self, token_ids: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """Return (n, d) float32 rows, owned by the caller; a sequence without tokens gives a row of zeros."""
        filled = [row for row, ids in enumerate(token_ids) if len(ids)]
        rows = np.zeros((len(token_ids), self._width), np.float32)
        if filled:
            rows[filled] = self._run_packed(pack_sequences([token_ids[row] for row in filled]))
        return rows

    @torch.inference_mode()
    def _run_packed(self, batch: PackedBatch) -> NDArray[np.float32]:
        device = self._cache.device
        self._cache.step = UnkeptStep(batch, device)
        rotations = self._rotations
        try:
            with nullcontext() if rotations is None else rotations.row(token_lengths(batch)):
                hidden = self._model(
                    input_ids=move(torch.from_numpy(batch.input_ids)[None], device),
                    position_ids=move(torch.from_numpy(batch.position_ids)[None], device),
                    use_cache=False,
                ).last_hidden_state[0]
        finally:
            self._cache.step = None
        return dense_rows(self._head, hidden, batch)
