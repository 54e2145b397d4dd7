"""Reads MiniCPM rerankers, which have a head behind each upper layer. A model ends after one of them, with its head.

The authors' code is never run. transformers' Granite computes the same; MiniCPM's factors have other names there.
Source: https://github.com/FlagOpen/FlagEmbedding, inference/reranker/decoder_only/models/modeling_minicpm_reranker.py.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from sie.catalog.files import refuse

_CLASS: Final = "LayerWiseMiniCPMForCausalLM"


class Layerwise(msgspec.Struct, frozen=True):
    """The changes with which the library's class computes such a model. The fields are those of `ModelCard`."""

    config_changes: dict[str, Any]
    weight_names: tuple[tuple[str, ...], ...]


def is_layerwise(config: dict[str, Any]) -> bool:
    """Tell whether a checkpoint has a head behind each of its upper layers."""
    return (config.get("architectures") or [""])[0] == _CLASS


def read_layerwise(model_id: str, config: dict[str, Any], layer: int | None) -> Layerwise:
    """Return a model's form when it is cut off after a layer, counted from 1; None means its last layer.

    Raises ModelLoadFailed for a layer without a head, and for heads of the whole vocabulary.
    """
    head_type, first, depth = (
        config.get("head_type", "simple"),
        int(config["start_layer"]),
        int(config["num_hidden_layers"]),
    )
    if head_type != "simple":
        raise refuse(model_id, f"its head_type is {head_type!r}; only 'simple' heads, of one number, are computed")
    last = depth if layer is None else layer
    if not first <= last <= depth:
        raise refuse(model_id, f"its reranker section sets layer to {last}; its layers {first} to {depth} have heads")
    own = f"^lm_head\\.{last - first}\\." if config.get("head_multi", True) else "^lm_head\\."
    unused = "|".join(str(number) for number in range(last, depth))
    rules = [(f"{own}linear_head\\.", "score."), ("^lm_head\\.",), (f"^model\\.layers\\.(?:{unused})\\.",)]
    return Layerwise(_granite(config, last), tuple(rules if unused else rules[:2]))


def _granite(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return Granite's configuration. The factor of residual sums is that of the whole depth."""
    head_width = int(config["hidden_size"]) / int(config["num_attention_heads"])
    return {
        "model_type": "granite",
        "num_hidden_layers": num_layers,
        "num_labels": 1,
        "tie_word_embeddings": False,
        "embedding_multiplier": float(config.get("scale_emb", 1.0)),
        "residual_multiplier": float(config.get("scale_depth", 1.0)) / math.sqrt(int(config["num_hidden_layers"])),
        "attention_multiplier": head_width**-0.5,
    }
