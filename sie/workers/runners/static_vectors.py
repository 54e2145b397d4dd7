"""Runs a model that is a table of token vectors: a text's vector is their mean. There is no transformer.

Always on the CPU, where the mean takes less time than a copy to a GPU. Source: StaticEmbedding of
sentence_transformers 6.2, and model2vec.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import embedding_bag

from sie.catalog.files import refuse
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.runners.head import build_layers


class StaticRunner:
    """A loaded table. Used by one thread at a time."""

    dtype = "float32"

    def __init__(self, card: ModelCard) -> None:
        """Read the table. Raises ModelLoadFailed for one that does not fit its tokens."""
        assert card.static_vectors is not None
        self.card = card
        self._table = _read_table(card.id, card.static_vectors.weights_file)
        self._skipped_id = card.static_vectors.skipped_id
        self._layers = build_layers(card.id, card.pipeline, torch.device("cpu"))
        self.memory_bytes = self._table.nbytes + sum(weight.nbytes for weight in self._layers.parameters())

    def run(self, step: RowStep) -> StepOutputs:
        """Return the dense rows of a step; see `RowRunner`."""
        return StepOutputs(self.run_tokens(step.inputs))

    def run_tokens(self, token_ids: Sequence[NDArray[np.int32]]) -> NDArray[np.float32]:
        """Return (n, d) float32 rows, without the checkpoint's last normalise; a text without tokens has zeros.

        Each item is (t_i,). Raises BadRequest for an id outside the table.
        """
        if self._skipped_id is not None:
            token_ids = [ids[ids != self._skipped_id] for ids in token_ids]
        bounds = np.cumsum([0, *map(len, token_ids)])
        ids = np.concatenate(token_ids).astype(np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._table):
            raise BadRequest(f"a token id is not in the vocabulary of {len(self._table)}")
        with torch.inference_mode():
            means = embedding_bag(
                torch.from_numpy(ids), self._table, torch.from_numpy(bounds), mode="mean", include_last_offset=True
            )
            rows = self._layers(means).numpy()
        rows[np.diff(bounds) == 0] = 0
        return rows


def _read_table(model_id: str, weights_file: str) -> Tensor:
    """Return (tokens, d) float32: `embeddings`, by way of `mapping` and times `weights` if there are some."""
    tensors = load_file(Path(weights_file))
    table = tensors["embedding.weight"] if "embedding.weight" in tensors else tensors["embeddings"]
    if not table.is_floating_point():
        raise refuse(model_id, f"its table is of {table.dtype}, which needs scales that its file does not have")
    table = table.float()
    if (mapping := tensors.get("mapping")) is not None:
        if len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
            raise refuse(model_id, "its mapping names rows that its table does not have")
        table = table[mapping.long()]
    weights = tensors.get("weights")
    return table if weights is None else table * weights.float()[:, None]
