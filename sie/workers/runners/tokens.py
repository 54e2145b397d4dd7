"""Computes vectors of tokens: chooses the tokens that get one, and projects their hidden states.

Source: ColBERT, arXiv 2004.12832, sections 3.2 and 3.3 (query augmentation, punctuation filter); M3-Embedding, arXiv
2402.03216, section 3.1. In padded queries the expansion tokens have vectors and attend to the text. The checkpoint
decides whether the text attends to them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

from sie.catalog.files import refuse
from sie.values.card import LateInteraction, ModelCard
from sie.workers.device.device import move, read_later
from sie.workers.packed.batch import PackedBatch
from sie.workers.runners.head import build_layers
from sie.workers.stall_notices import read_tokenizer


class QueryExpansion:
    """Pads queries to a length with a token that the checkpoint names."""

    def __init__(self, model_id: str, late: LateInteraction, tokenizer: Tokenizer) -> None:
        token_id = tokenizer.token_to_id(late.expansion_token)
        if token_id is None:
            raise refuse(model_id, f"its tokenizer does not know the expansion token {late.expansion_token!r}")
        self._filler = np.full(late.expand_to, token_id, np.int32)
        self._is_attended = late.attend_to_expansion

    def __call__(self, token_ids: NDArray[np.int32], length: int | None = None) -> tuple[NDArray[np.int32], int]:
        """Return the padded query, and how many of its first tokens the others attend to.

        length replaces the checkpoint's length, which is also the maximum.
        """
        missing = min(len(self._filler), len(self._filler) if length is None else length) - len(token_ids)
        if missing <= 0:
            return token_ids, len(token_ids)
        filled = np.concatenate((token_ids, self._filler[:missing]))
        return filled, len(filled) if self._is_attended or not len(token_ids) else len(token_ids)


class TokenHead:
    """Turns packed hidden states into vectors of tokens in float32, without the last normalise."""

    def __init__(self, card: ModelCard, device: torch.device) -> None:
        late = card.late
        assert late is not None
        self._late = late
        self._layers = (
            _linear(late.linear_file, device) if late.linear_file else build_layers(card.id, late.steps, device)
        )
        self._skipped = np.array(_skipped_ids(card), np.int64)
        self.memory_bytes = sum(weight.nbytes for weight in self._layers.parameters())

    def launch(
        self, hidden: Tensor, batch: PackedBatch, is_query: NDArray[np.bool_]
    ) -> Callable[[], list[NDArray[np.float32]]]:
        """Return a function that waits for each sequence's rows (r, d) float32, in the batch's order.

        hidden is (t, width), is_query (n,) in the batch's order.
        """
        rows, counts = self._project(hidden, batch, is_query)
        wait = read_later(rows)
        return lambda: np.split(wait().numpy(), counts.cumsum()[:-1])

    def launch_tensors(
        self, hidden: Tensor, batch: PackedBatch, is_query: NDArray[np.bool_]
    ) -> Callable[[], list[Tensor]]:
        """Return a function that gives the same, without a wait, as views of one tensor on the model's device."""
        rows, counts = self._project(hidden, batch, is_query)
        return lambda: list(rows.split(counts.tolist()))

    def _project(
        self, hidden: Tensor, batch: PackedBatch, is_query: NDArray[np.bool_]
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Return all rows back to back, and the number of rows of each sequence."""
        kept = self._kept(batch, np.repeat(is_query, np.diff(batch.cu_seqlens)))
        rows = self._layers(hidden[move(torch.from_numpy(kept.nonzero()[0]), hidden.device)].float())
        return rows, np.add.reduceat(kept, batch.cu_seqlens[:-1], dtype=np.int64)

    def _kept(self, batch: PackedBatch, of_query: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return (t,): whether a token gets a vector; of_query tells whether its text is a query."""
        kept = np.ones(len(batch.input_ids), np.bool_)
        if len(self._skipped):
            filtered = np.where(of_query, self._late.skip_in_queries, self._late.skip_in_documents)
            kept &= ~(np.isin(batch.input_ids, self._skipped) & filtered)
        if self._late.drop_first:
            kept[batch.cu_seqlens[:-1]] = False
        return kept


def _skipped_ids(card: ModelCard) -> list[int]:
    """Return the ids of the skipped words that are one token; other words would match every unknown token."""
    assert card.late is not None
    if not card.late.skipped_words:
        return []
    tokenizer = read_tokenizer(card.tokenizer_file)
    ids = (tokenizer.token_to_id(word) for word in card.late.skipped_words)
    return [token_id for token_id in ids if token_id is not None]


def _linear(path: str, device: torch.device) -> nn.Sequential:
    """Return a projection from a file with a model's `linear.weight`, or with a layer's own `weight` and `bias`."""
    with safe_open(Path(path), framework="pt", device=str(device)) as file:
        names = set(file.keys())
        prefix = "linear." if "linear.weight" in names else ""
        weight = file.get_tensor(f"{prefix}weight").float()
        bias = file.get_tensor(f"{prefix}bias").float() if f"{prefix}bias" in names else None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return nn.Sequential(linear)
