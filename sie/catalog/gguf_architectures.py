"""Lists GGUF architectures that transformers' table lacks, as rows of that table. Imports transformers when called.

transformers has a class for each of them, and gguf the names of its tensors. Source of what their converter writes:
llama.cpp's conversion (`gemma.py`, `granite.py`, `olmo.py`, `smollm.py`) and `llama_model_rope_type`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

_COMMON: Final = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.dimension_count": None,
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_SCALES: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An architecture: names in the library's configuration by those in the metadata, and what the converter changes."""

    config: dict[str, str | None]
    converted: Literal["", "permuted", "norms"] = ""
    """permuted: rows of queries and keys, for neighbouring pairs of rotary positions. norms: their weights plus one."""
    values: dict[str, Any] = {}
    """Values of the configuration that no metadata give, in place of the library's defaults."""
    refused: tuple[str, ...] = ("rope.scaling.type",)
    """Metadata that the library's reader would ignore, although they change the numbers."""


ROWS: Final = {
    "gemma": Row(config={**_COMMON, "attention.key_length": "head_dim"}, converted="norms"),
    "granite": Row(config={**_COMMON, **_SCALES}, converted="permuted"),
    "olmo2": Row(config=_COMMON, refused=("rope.scaling.type", "attention.sliding_window")),  # windows: OLMo 3
    "smollm3": Row(config=_COMMON, converted="permuted", values={"pad_token_id": None}),  # the default may be too large
}


def add_rows() -> None:
    """Add the rows to transformers' table, unless it has its own."""
    from transformers import modeling_gguf_pytorch_utils as library

    tables: Any = library
    for name, row in ROWS.items():
        if name not in tables.GGUF_CONFIG_MAPPING:
            tables.GGUF_CONFIG_MAPPING[name] = row.config
            tables.GGUF_SUPPORTED_ARCHITECTURES.append(name)
            tables.GGUF_CONFIG_DEFAULTS_MAPPING[name] = row.values
            processors = {"permuted": tables.LlamaTensorProcessor, "norms": tables.Gemma2TensorProcessor}
            if row.converted:
                tables.TENSOR_PROCESSORS[name] = processors[row.converted]


def unread_field(fields: dict[str, Any]) -> str:
    """Return the name of a metadata field that changes the numbers and would be ignored, or empty."""
    name = str(fields.get("general.architecture", ""))
    keys = ROWS[name].refused if name in ROWS else ()
    return next((f"{name}.{key}" for key in keys if fields.get(f"{name}.{key}", "none") not in ("none", 0)), "")
