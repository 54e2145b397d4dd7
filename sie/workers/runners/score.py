"""Runs a model that scores pairs: its transformer on the packed step, then its own head (`ModelHead`).

For the head, sequences of one length form a rectangle of the packed row. Most heads read only the first or the last
token. If the probe confirms this, the head gets only the two ends of every sequence, in one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from sie.values.card import ModelCard, ScoreRule
from sie.values.work import WorkHeader
from sie.workers.model_api import Pair, RowStep, StepOutputs
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.runners.encode import Backbone, Execution, in_order_later
from sie.workers.runners.stand_in import ModelHead

HeadView = Literal["ends", "all", "model"]
"""The head's input: each sequence's first and last token ("ends"), every token, or the model runs whole ("model")."""


_NO_TOKEN = -1


class ScoreModel:
    """A model with a transformer and a head, run together or separately."""

    def __init__(self, model: PreTrainedModel, device: torch.device, rule: ScoreRule | None) -> None:
        """Split a model into its transformer and its head; without a rule, logits are returned unchanged."""
        self.backbone = Backbone(cast("PreTrainedModel", model.base_model), device)
        self.memory_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in model.parameters()}.values())
        self._model = model
        self._head = ModelHead(model)
        self._rule = rule
        config = model.config.get_text_config()
        if config.pad_token_id is None:
            # The heads of decoders read each sequence's last token that is not padding. Without a padding token they
            # refuse a batch of several sequences, even of equal length.
            config.pad_token_id = _NO_TOKEN
        self._padding: int = config.pad_token_id
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._arguments: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}

    def run(self, batch: PackedBatch, execution: Execution, view: HeadView) -> Tensor:
        """Return (n,) float32 logits, or (n, classes) without a rule, in the batch's order."""
        if view == "model":
            return self.run_whole(batch)
        return self.run_head(self.backbone.run(batch, execution), batch, view)

    def run_whole(self, batch: PackedBatch) -> Tensor:
        """Run the model as the library does, with a separate batch for each sequence length."""
        parts: list[Tensor] = []
        for start, count, length in batch.runs:
            rectangle = batch.input_ids[start : start + count * length].reshape(count, length)
            types = self.backbone.type_arguments(batch, start, count, length)
            for rows in self._runs_together(rectangle):
                own = {name: values[rows] for name, values in types.items()}
                logits = self._model(input_ids=self.backbone.move(rectangle[rows]), **own, **self._arguments).logits
                parts.append(self._scores(logits))
        return torch.cat(parts)

    def _runs_together(self, rectangle: NDArray[np.int64]) -> list[slice]:
        """Return the rows of a rectangle that the model takes in one call, in order.

        The head of an encoder-decoder refuses rows with different numbers of end tokens, such as a text and a pair.
        """
        config = self._model.config
        if getattr(config, "is_encoder_decoder", False):
            counts = (rectangle == config.eos_token_id).sum(axis=1)
            if (counts != counts[0]).any():
                return [slice(row, row + 1) for row in range(len(rectangle))]
        return [slice(None)]

    def run_head(self, hidden: Tensor, batch: PackedBatch, view: HeadView) -> Tensor:
        """Run the head on the transformer's hidden states (t, d)."""
        input_ids = self.backbone.move(batch.input_ids)
        last = batch.cu_seqlens[1:] - 1
        # If a sequence ends in a padding token, a head that searches for the last other token needs all tokens.
        if view == "ends" and not (batch.input_ids[last] == self._padding).any():
            ends = self.backbone.move(np.stack((batch.cu_seqlens[:-1], last), axis=1).astype(np.int64))
            return self._scores(self._head(hidden[ends], input_ids=input_ids[ends], **self._arguments))
        parts: list[Tensor] = []
        for start, count, length in batch.runs:
            tokens = slice(start, start + count * length)
            shape = (count, length)
            rectangle = input_ids[tokens].unflatten(0, shape)
            logits = self._head(hidden[tokens].unflatten(0, shape), input_ids=rectangle, **self._arguments)
            parts.append(self._scores(logits))
        return torch.cat(parts)

    def _scores(self, logits: Tensor) -> Tensor:
        if self._rule is None:
            return logits.float()
        if self._rule.true_token_id is None:
            return logits[:, 0].float()
        scores = logits[:, -1, self._rule.true_token_id].float()
        if self._rule.false_token_id is not None:
            scores = scores - logits[:, -1, self._rule.false_token_id].float()
        return scores


class ScoreRunner:
    """A loaded model that scores pairs. Built by `sie.workers.loading.loader`; used by one thread at a time."""

    def __init__(
        self,
        card: ModelCard,
        model: ScoreModel,
        activation: nn.Module,
        *,
        execution: Execution,
        view: HeadView,
        dtype: str,
    ) -> None:
        self.card = card
        self.execution = execution
        self.view: HeadView = view
        self.dtype = dtype
        """Format of the weights: float32, bfloat16, float16 or int8."""
        self.memory_bytes = model.memory_bytes + model.backbone.extra_bytes
        self._model = model
        self._activation = activation
        self._divisor = 1.0 if card.score is None else card.score.divisor

    @property
    def works_ahead(self) -> bool:
        """Whether a step can begin before the one before has been read; see `AheadRunner`."""
        return self._model.backbone.device.type == "cuda" and not self.execution.pads

    def run(self, step: RowStep) -> StepOutputs:
        """Return the scores of a step; see `RowRunner`."""
        return self.launch(step)()

    def launch(self, step: RowStep) -> Callable[[], StepOutputs]:
        """Begin a step; see `AheadRunner`."""
        raw = [index for index, want in enumerate(step.wants) if isinstance(want, WorkHeader) and want.is_raw]
        scores = self._launch_pairs(step.inputs, raw)
        return lambda: StepOutputs(scores=scores())

    def run_pairs(self, pairs: Sequence[Pair], raw: Sequence[int] = ()) -> NDArray[np.float32]:
        """Return (n, 1) float32 scores, owned by the caller; raw lists the pairs whose activation is left out.

        Raises the errors of `Backbone.check`.
        """
        return self._launch_pairs(pairs, raw)()

    def _launch_pairs(self, pairs: Sequence[Pair], raw: Sequence[int]) -> Callable[[], NDArray[np.float32]]:
        batch = pack_pairs(pairs)
        self._model.backbone.check(self.card.id, batch)
        with torch.inference_mode():
            logits = self._model.run(batch, self.execution, self.view)[:, None] / self._divisor
            scores = in_order_later(self._activation(logits), batch)
            plain = in_order_later(logits, batch) if raw else None

        def finish() -> NDArray[np.float32]:
            answer = scores()
            if plain is not None:
                answer[raw] = plain()[raw]
            return answer

        return finish


def pack_pairs(pairs: Sequence[Pair]) -> PackedBatch:
    """Pack pairs, with their token types if all of them have some."""
    types = [pair.token_types for pair in pairs if pair.token_types is not None]
    return pack_sequences([pair.token_ids for pair in pairs], types if len(types) == len(pairs) else None)
