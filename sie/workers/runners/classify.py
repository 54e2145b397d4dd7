"""Runs classifiers whose logits the frontend reads: one row for each token, or one for each pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from sie.values.card import ModelCard
from sie.values.extract import TokenClassification
from sie.workers.model_api import Pair, RowStep, StepOutputs
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.runners.encode import Backbone, Execution, weight_bytes
from sie.workers.runners.score import HeadView, ScoreModel, pack_pairs
from sie.workers.runners.stand_in import ModelHead


class TokenModel:
    """A model with a transformer and a head that reads every token, run together or separately."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.backbone = Backbone(cast("PreTrainedModel", model.base_model), device)
        self.memory_bytes = weight_bytes(model.parameters())
        self._model = model
        self._head = ModelHead(model)

    def run(self, batch: PackedBatch, execution: Execution, *, whole: bool) -> Tensor:
        """Return (t, classes) float32 logits, in the batch's order."""
        return self.run_whole(batch) if whole else self.run_head(self.backbone.run(batch, execution), batch)

    def run_whole(self, batch: PackedBatch) -> Tensor:
        """Run the model as the library does, with a separate batch for each sequence length."""
        parts: list[Tensor] = []
        for start, count, length in batch.runs:
            rectangle = batch.input_ids[start : start + count * length].reshape(count, length)
            parts.append(self._model(input_ids=self.backbone.move(rectangle)).logits.flatten(0, 1))
        return torch.cat(parts).float()

    def run_head(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Run the head on the transformer's hidden states (t, d), with all sequences as one."""
        return self._head(hidden[None], input_ids=self.backbone.move(batch.input_ids)[None])[0].float()


class TokenClassifyRunner:
    """A loaded model that classifies tokens. Built by `sie.workers.loading.loader`; used by one thread at a time."""

    def __init__(self, card: ModelCard, model: TokenModel, *, execution: Execution, whole: bool, dtype: str) -> None:
        self.card = card
        self.execution = execution
        self.whole = whole
        """Whether the model cannot be separated from its head."""
        self.dtype = dtype
        """Format of the weights: float32, bfloat16 or float16."""
        self.memory_bytes = model.memory_bytes + model.backbone.extra_bytes
        self._model = model

    def run(self, step: RowStep) -> StepOutputs:
        """Return the logits of each token of a step; see `RowRunner`."""
        return StepOutputs(token_logits=self.run_token_logits(step.inputs))

    def run_token_logits(self, token_ids: Sequence[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Return the logits (t_i, classes) of each sequence (t_i,), which may be empty. Raises the errors of `Backbone.check`."""
        filled = [item for item, ids in enumerate(token_ids) if len(ids)]
        rule = self.card.extract
        assert isinstance(rule, TokenClassification)
        answer = [np.empty((0, len(rule.labels)), np.float32)] * len(token_ids)
        if not filled:
            return answer
        batch = pack_sequences([token_ids[item] for item in filled])
        self._model.backbone.check(self.card.id, batch)
        with torch.inference_mode():
            logits = self._model.run(batch, self.execution, whole=self.whole).cpu().numpy()
        for place, rows in zip(batch.order, np.split(logits, batch.cu_seqlens[1:-1]), strict=True):
            answer[filled[place]] = rows
        return answer


class PairClassifyRunner:
    """A loaded model that classifies pairs of texts. Built by `sie.workers.loading.loader`; used by one thread."""

    def __init__(self, card: ModelCard, model: ScoreModel, *, execution: Execution, view: HeadView, dtype: str) -> None:
        self.card = card
        self.execution = execution
        self.view: HeadView = view
        self.dtype = dtype
        """Format of the weights: float32, bfloat16 or float16."""
        self.memory_bytes = model.memory_bytes + model.backbone.extra_bytes
        self._model = model

    def run(self, step: RowStep) -> StepOutputs:
        """Return the logits of each pair of a step; see `RowRunner`."""
        return StepOutputs(logits=self.run_logits(step.inputs))

    def run_logits(self, pairs: Sequence[Pair]) -> NDArray[np.float32]:
        """Return (n, classes) float32 logits, owned by the caller. Raises the errors of `Backbone.check`."""
        batch = pack_pairs(pairs)
        self._model.backbone.check(self.card.id, batch)
        with torch.inference_mode():
            logits = self._model.run(batch, self.execution, self.view).cpu().numpy()
        answer = np.empty_like(logits)
        answer[batch.order] = logits
        return answer
