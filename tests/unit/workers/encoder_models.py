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
    "mpnet": _build(transformers.MPNetConfig, transformers.MPNetModel, pad_token_id=1),
}
_GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LOCAL = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
MODERN = {
    "modernbert": _build(transformers.ModernBertConfig, transformers.ModernBertModel, local_attention=32, **_LOCAL),
    "modernbert, biases, no round widths": _build(
        transformers.ModernBertConfig, transformers.ModernBertModel, hidden_size=72, num_attention_heads=6,
        intermediate_size=50, attention_bias=True, mlp_bias=True, norm_bias=True, local_attention=6, **_LOCAL,
    ),
    "llama": _build(transformers.LlamaConfig, transformers.LlamaModel, **_GROUPED),
    "llama, one head": _build(transformers.LlamaConfig, transformers.LlamaModel, num_attention_heads=1),
    "mistral": _build(transformers.MistralConfig, transformers.MistralModel, **_GROUPED, sliding_window=20),
    "mistral, a window without end": _build(
        transformers.MistralConfig, transformers.MistralModel, **_GROUPED, sliding_window=2**31 - 1
    ),
    "qwen2": _build(transformers.Qwen2Config, transformers.Qwen2Model, **_GROUPED),
    "qwen3": _build(transformers.Qwen3Config, transformers.Qwen3Model, **_GROUPED, head_dim=32),
    "gemma": _build(transformers.GemmaConfig, transformers.GemmaModel, num_key_value_heads=1, head_dim=48),
    "gemma3": _build(
        transformers.Gemma3TextConfig, transformers.Gemma3TextModel, **_GROUPED, **_LOCAL, head_dim=16, sliding_window=20
    ),
    "gemma3, both sides": _build(
        transformers.Gemma3TextConfig, transformers.Gemma3TextModel, **_GROUPED, **_LOCAL, head_dim=32, sliding_window=40,
        use_bidirectional_attention=True,
    ),
    "olmo2": _build(transformers.Olmo2Config, transformers.Olmo2Model, **_GROUPED),
    "phi3": _build(transformers.Phi3Config, transformers.Phi3Model, **_GROUPED, bos_token_id=1, eos_token_id=2),
    "granite": _build(
        transformers.GraniteConfig, transformers.GraniteModel, **_GROUPED, embedding_multiplier=3.0, residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "eurobert": _build(transformers.EuroBertConfig, transformers.EuroBertModel, **_GROUPED),
    "nomic-bert": _build(transformers.NomicBertConfig, transformers.NomicBertModel),
    # As in `SINCE` of sie/catalog/architecture.py: transformers 5.17 lacks it.
    **({"gte": _build(transformers.GteConfig, transformers.GteModel)} if hasattr(transformers, "GteConfig") else {}),
    "jina-v3": _build(transformers.JinaEmbeddingsV3Config, transformers.JinaEmbeddingsV3Model),
}  # fmt: skip
"""With rotary factors: norms before, on both sides of, and after what layers add; gated MLPs; groups of heads; windows."""
OTHERS = {
    "albert": _build(transformers.AlbertConfig, transformers.AlbertModel),
    "electra with a projection": _build(transformers.ElectraConfig, transformers.ElectraModel, embedding_size=32),
    "deberta": _build(transformers.DebertaV2Config, transformers.DebertaV2Model),
    "an activation of its own": _build(transformers.BertConfig, transformers.BertModel, hidden_act="mish"),
    "rotary factors that depend on the length": _build(
        transformers.LlamaConfig,
        transformers.LlamaModel,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    ),
    "queries scaled by position": _build(
        transformers.Ministral3Config,
        transformers.Ministral3Model,
        **_GROUPED,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 200,
        },
    ),
    "capped scores": _build(transformers.Gemma2Config, transformers.Gemma2Model, **_GROUPED, head_dim=16),
    "experts": _build(
        transformers.MixtralConfig, transformers.MixtralModel, **_GROUPED, num_local_experts=2, num_experts_per_tok=1
    ),
    "a head of odd width": _build(
        transformers.BertConfig, transformers.BertModel, hidden_size=36, num_attention_heads=4
    ),
}


def rounded(model: torch.nn.Module) -> Any:
    """Round a model's linear layers to eight bits, in place."""
    round_encoder("tiny", cast("Any", model), choose_encoder_format("int8", "float32", torch.device("cpu")))
    return model
