"""Runs a GLiClass model: takes a step's token ids, and returns one logit for each label.

The library's model runs sequences as a batch. Some of its poolings include padding. So sequences run in rectangles of
equal length and number of labels, and no result depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.extract import Gliclass
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.packed.rotation import find_rotations
from sie.workers.runners.encode import weight_bytes


class GliclassRunner:
    """A loaded GLiClass model. Built by `sie.workers.loading.libraries`; used by one thread at a time."""

    def __init__(self, card: ModelCard, model: Any, device: torch.device, dtype: str) -> None:
        assert isinstance(card.extract, Gliclass)
        self.card = card
        self.dtype = dtype
        """Format of the weights: float32, bfloat16 or float16."""
        self.memory_bytes = weight_bytes(model.parameters())
        self._rule = card.extract
        self._model = model
        find_rotations(model)  # each rectangle has the rotary factors of its own length
        self._device = device
        self._vocab_size: int = model.get_input_embeddings().num_embeddings

    def run(self, step: RowStep) -> StepOutputs:
        """Return the logits of each token of a step; see `RowRunner`."""
        return StepOutputs(token_logits=self.run_token_logits(step.inputs))

    def run_token_logits(self, token_ids: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return the logits (labels_i, 1) of each sequence (t_i,). Raises BadRequest for an unknown token id."""
        answer = [np.empty((0, 1), np.float32)] * len(token_ids)
        shapes = [(len(ids), int((ids == self._rule.label_token_id).sum())) for ids in token_ids]
        in_order = sorted((item for item, shape in enumerate(shapes) if shape[1]), key=shapes.__getitem__)
        for (_, num_labels), members in groupby(in_order, key=shapes.__getitem__):
            items = list(members)
            logits = self._run(np.stack([token_ids[item] for item in items]), num_labels)
            for item, row in zip(items, logits, strict=True):
                answer[item] = row[:, None]
        return answer

    def _run(self, ids: NDArray[np.int32], num_labels: int) -> NDArray[np.float32]:
        """Return (n, labels) float32 logits of a rectangle of ids (n, t)."""
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab_size:
            raise BadRequest(f"A token id is not in the vocabulary of {self._vocab_size}")
        input_ids = torch.from_numpy(ids.astype(np.int64)).to(self._device)
        with torch.inference_mode():
            logits = self._model(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_num_classes=self._rule.max_labels or num_labels,
            ).logits
        return logits[:, :num_labels].float().cpu().numpy()
