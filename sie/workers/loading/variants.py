"""Provides layers for checkpoints that differ from an architecture of transformers in some of its layers.

`sie/catalog/remote_code.toml` and `sie/catalog/rerankers.toml` list these checkpoints. Each class reads weights under its own names.
A base class that transformers 5.17 lacks is imported with its variant, so that the others load there.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.granite.modeling_granite import GranitePreTrainedModel
from transformers.models.jina_embeddings_v3.modeling_jina_embeddings_v3 import JinaEmbeddingsV3Model
from transformers.models.mistral.modeling_mistral import MistralModel


class ExpertsModel(JinaEmbeddingsV3Model):
    """An encoder with rotary positions whose every second layer is a mixture of experts: nomic-embed-text-v2-moe."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, add_pooling_layer=False)
        for index, layer in enumerate(self.layers):
            if config.moe_every_n_layers and index % config.moe_every_n_layers == 1:
                layer.mlp = _Experts(config)


class _Experts(nn.Module):
    """Adds up the answers of each token's best experts, by their share in a softmax over all experts, and a bias.

    Source: text-embeddings-inference, backends/candle/src/models/nomic.rs.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        count, width, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self._num_chosen: int = config.moe_top_k
        self.router = nn.ModuleDict({"layer": nn.Linear(width, count, bias=False)})
        self.experts = nn.Module()
        self.experts.bias = nn.Parameter(torch.zeros(width))
        self.experts.mlp = nn.ParameterDict(
            {"w1": torch.zeros(count * inner, width), "w2": torch.zeros(count * inner, width)}
        )
        self._count = count

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        shares = self.router["layer"](tokens).float().softmax(-1)
        shares, chosen = shares.topk(self._num_chosen, dim=-1)
        weights: Any = self.experts.mlp
        first, second = (weights[name].unflatten(0, (self._count, -1)) for name in ("w1", "w2"))
        out = torch.zeros_like(tokens)
        for expert in range(self._count):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            answer = gelu(linear(tokens[rows], first[expert])) @ second[expert]
            out.index_add_(0, rows, answer * shares[rows, places, None].to(answer.dtype))
        return (out + self.experts.bias).view_as(hidden)  # type: ignore[operator]  # a parameter


class LatentModel(MistralModel):
    """A Mistral whose hidden states then attend, each by itself, over learned vectors: NV-Embed.

    Source: NV-Embed, arXiv 2405.17428, section 3.1; the defaults are those of its configuration_nvembed.py.
    """

    def __init__(self, config: Any) -> None:
        config.sliding_window = None  # its code builds one mask for all layers, over the whole text
        super().__init__(config)
        given = getattr(config, "latent_attention_config", {})
        own = {"num_latents_value": 512, "num_cross_heads": 8, "cross_dim_head": 4096, **given}
        self.latent = _OverLatents(config.hidden_size, **{key: own[key] for key in _LATENT_KEYS})

    def forward(self, *args: Any, **arguments: Any) -> Any:
        out = super().forward(*args, **arguments)
        out.last_hidden_state = self.latent(out.last_hidden_state)
        return out


_LATENT_KEYS: Final = ("num_latents_value", "num_cross_heads", "cross_dim_head")


class _OverLatents(nn.Module):
    """Attention over learned vectors, and a gated layer, each with a norm before it and a sum behind it.

    Its name must not contain "Attention": transformers would take this module for one with attention of its own.
    """

    def __init__(self, width: int, num_latents_value: int, num_cross_heads: int, cross_dim_head: int) -> None:
        super().__init__()
        inner = num_cross_heads * cross_dim_head
        attention, gated = nn.Module(), nn.Module()
        attention.norm, attention.norm_context, gated.norm = (nn.LayerNorm(width) for _ in range(3))
        attention.fn = nn.ModuleDict(
            {
                "to_q": nn.Linear(width, inner, bias=False),
                "to_kv": nn.Linear(width, 2 * inner, bias=False),
                "to_out": nn.Linear(inner, width, bias=False),
            }
        )
        gated.fn = nn.ModuleDict(
            {"net": nn.Sequential(nn.Linear(width, 8 * width), nn.Identity(), nn.Linear(4 * width, width))}
        )
        self.cross_attend_blocks = nn.ModuleList([attention, gated])
        self.latents = nn.Parameter(torch.zeros(num_latents_value, width))
        self._num_heads = num_cross_heads

    def forward(self, hidden: Tensor) -> Tensor:
        attention, gated = (cast("Any", block) for block in self.cross_attend_blocks)
        query = attention.fn["to_q"](attention.norm(hidden))
        key, value = attention.fn["to_kv"](attention.norm_context(self.latents)).chunk(2, -1)
        query, key, value = (
            rows.unflatten(-1, (self._num_heads, -1)).transpose(-3, -2) for rows in (query, key, value)
        )
        found = scaled_dot_product_attention(
            query, key.expand(*query.shape[:-2], -1, -1), value.expand(*query.shape[:-2], -1, -1)
        )
        hidden = hidden + attention.fn["to_out"](found.transpose(-3, -2).flatten(-2))
        first, _, second = gated.fn["net"]
        values, gates = first(gated.norm(hidden)).chunk(2, -1)
        return hidden + second(values * gelu(gates))


class LayerwiseModel(GenericForSequenceClassification, GranitePreTrainedModel):
    """Some layers of a MiniCPM, which computes as Granite does, and the head behind them: `sie.catalog.layerwise`."""


_VARIANTS: Final[dict[str, type[Any]]] = {"experts": ExpertsModel, "latent": LatentModel, "layerwise": LayerwiseModel}


def variant_class(layers: str) -> type[Any]:
    """Return the model class of `ModelCard.layers`."""
    if layers == "alibi":
        from sie.workers.loading.alibi_model import AlibiModel  # its base is missing in transformers 5.17

        return AlibiModel
    return _VARIANTS[layers]
