"""Encoders of few random weights: of the kinds that have a compiled form, and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import transformers

from sie.workers.runners.encoder_formats import choose_encoder_format, round_encoder

SMALL = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "pad_token_id": 0,
         "intermediate_size": 128, "max_position_embeddings": 300}  # fmt: skip


def _build(config: type[Any], model: type[Any], **values: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        torch.manual_seed(3)
        made = model(config(**{**SMALL, **values}))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return made.eval().requires_grad_(requires_grad=False)

    return make


MODELS = {
    "bert": _build(transformers.BertConfig, transformers.BertModel),
    "bert, gelu_new": _build(transformers.BertConfig, transformers.BertModel, hidden_act="gelu_new"),
    "bert, relu": _build(transformers.BertConfig, transformers.BertModel, hidden_act="relu"),
    "bert, silu": _build(transformers.BertConfig, transformers.BertModel, hidden_act="silu"),
    "bert, no round widths": _build(
        transformers.BertConfig, transformers.BertModel, hidden_size=36, num_attention_heads=6, intermediate_size=50
    ),
    "bert, one head": _build(transformers.BertConfig, transformers.BertModel, num_attention_heads=1),
    "roberta": _build(transformers.RobertaConfig, transformers.RobertaModel, pad_token_id=1),
    "xlm-roberta": _build(transformers.XLMRobertaConfig, transformers.XLMRobertaModel, pad_token_id=1),
    "camembert": _build(transformers.CamembertConfig, transformers.CamembertModel, pad_token_id=1),
    "electra": _build(transformers.ElectraConfig, transformers.ElectraModel, embedding_size=64),
    "distilbert": _build(
        transformers.DistilBertConfig, transformers.DistilBertModel, dim=64, hidden_dim=128, n_heads=4, n_layers=3
    ),
}
OTHERS = {
    "mpnet": _build(transformers.MPNetConfig, transformers.MPNetModel, pad_token_id=1),
    "albert": _build(transformers.AlbertConfig, transformers.AlbertModel),
    "electra with a projection": _build(transformers.ElectraConfig, transformers.ElectraModel, embedding_size=32),
    "deberta": _build(transformers.DebertaV2Config, transformers.DebertaV2Model),
    "an activation of its own": _build(transformers.BertConfig, transformers.BertModel, hidden_act="mish"),
    "a head of odd width": _build(
        transformers.BertConfig, transformers.BertModel, hidden_size=36, num_attention_heads=4
    ),
}


def rounded(model: torch.nn.Module) -> Any:
    """Round a model's linear layers to eight bits, in place."""
    round_encoder("tiny", cast("Any", model), choose_encoder_format("int8", "float32", torch.device("cpu")))
    return model
