"""Runs a model's head by itself, for any architecture: no head is known by name.

The model's own forward runs with a stand-in for its transformer, which returns hidden states that are already computed.
So a transformer that runs packed here keeps the head that its authors wrote.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions


class ModelHead:
    """Runs the part of a model after its transformer: hidden states to logits.

    The model is restored after each call. Used by one thread at a time.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._transformer = model.base_model
        self._stand_in = _StandIn(getattr(self._transformer, "pooler", None))

    def __call__(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """Return the model's logits as if its transformer had returned hidden (n, length, d).

        arguments are for the model's forward. The transformer's pooler, if any, also runs on the hidden states.
        """
        model, name = self.model, self.model.base_model_prefix
        self._stand_in.hidden = hidden
        setattr(model, name, self._stand_in)
        try:
            return model(**arguments).logits
        finally:
            setattr(model, name, self._transformer)
            self._stand_in.hidden = None


class _StandIn(nn.Module):
    hidden: Tensor | None = None

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self._pooler = pooler

    def forward(self, *_args: Any, **_kwargs: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return the stored hidden states, whatever the arguments are."""
        hidden = self.hidden
        assert hidden is not None
        pooled = None if self._pooler is None else self._pooler(hidden)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=pooled)  # type: ignore[arg-type]  # a FloatTensor is a Tensor
