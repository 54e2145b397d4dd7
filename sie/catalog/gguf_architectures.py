"""Lists the GGUF architectures that are read here, as rows of data. The others are transformers' own.

A row says which of transformers' models an architecture is, where the metadata give its configuration, and which tensors
are which weights. Source of what the files contain: llama.cpp's conversion (`bert.py`, `gemma.py`, `granite.py`,
`olmo.py`, `smollm.py`, `mistral3.py`, `exaone.py` and others), `llama_model_rope_type` in src/llama-model.cpp, and gguf's
constants.py and tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

Names = Mapping[str, str | tuple[str, ...]]

_SIZES: Final[Names] = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_CAUSAL: Final[Names] = {**_SIZES, "attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
_RMS: Final[Names] = {**_CAUSAL, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_LAYER: Final[Names] = {**_CAUSAL, "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
_WIDE: Final[Names] = {**_RMS, "attention.key_length": "head_dim"}
_SCALES: Final[Names] = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_TABLES: Final[Names] = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION: Final[Names] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GATED: Final[Names] = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS: Final[Names] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS: Final[Names] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS: Final[Names] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA: Final[Names] = {**_ATTENTION, **_GATED, **_NORMS}
_GEMMA2: Final[Names] = {
    **_RMS,
    "attention.key_length": ("head_dim", "query_pre_attn_scalar"),
    "attention.sliding_window": "sliding_window",
}
_GEMMA3: Final[Names] = {**_GEMMA2, "rope.freq_base_swa": "rope_local_base_freq"}
_GEMMA3_LAYERS: Final[Names] = {
    **_ATTENTION, **_GATED, **_HEAD_NORMS, **_POST_NORMS,
    "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm",
}  # fmt: skip
_EMBEDDINGS: Final[Names] = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
_ENCODER: Final[Names] = {**_SIZES, "attention.layer_norm_epsilon": "layer_norm_eps"}
_LATENTS: Final[Names] = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
_EXPERTS: Final[Names] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_ROUTED: Final[Names] = {
    name: _EXPERTS[name] for name in ("ffn_gate_inp", "ffn_gate_up_exps.weight", "ffn_down_exps.weight")
}
_JOINED_EXPERTS: Final = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
_EXPERT_SIZES: Final[Names] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DENSE: Final[Names] = {"dense_2": (), "dense_3": ()}
"""Layers behind the pooling. Their names are known, but they belong to no weight of the transformer."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An architecture."""

    model_type: str
    """transformers' name of its configuration."""
    config: Names
    """Keys of the configuration by the metadata that give them; the metadata's names are without the architecture."""
    layers: Names
    """The weights of a layer by its tensors. Several weights for one tensor are equal parts of its rows."""
    tables: Names = msgspec.field(default_factory=lambda: _TABLES)
    """The other weights."""
    prefix: str = "model.layers."
    """The name of the layers, before their number."""
    encodes: bool = False
    """Whether it is an encoder: a file has no head for tokens."""
    converted: Literal["", "permuted", "norms"] = ""
    """permuted: the rows of queries and keys are in another order, for rotations of neighbours. norms: 1 was added to them."""
    values: dict[str, Any] = {}
    """Values of the configuration where a file has no metadata for them. The library's own defaults differ."""
    present: dict[str, str] = {}
    """Keys of the configuration that say whether there is a tensor, by its name."""
    is_partial: bool = False
    """Whether only a part of a head's values may be rotated; `rope.dimension_count` has its size."""
    full_every: int = 0
    """With sliding windows, each layer of this number attends to all positions, unless the metadata list the layers."""
    scalings: tuple[Literal["llama3", "linear", "yarn", "longrope"], ...] = ()
    """The kinds of scaled rotary positions that are computed. Llama 3's and longrope's are in tensors, others are in the
    metadata."""
    has_temperature: bool = False
    """Whether queries grow with their position, by `attention.temperature_scale`."""
    first_position: int = 0
    """Number of the first position; a file has no rows for those before it."""
    wide_at: int = 0
    """Models with this many layers scale scores by the model's width over its heads, and all others by the width of a head."""
    refused: tuple[str, ...] = ()
    """Metadata that change the numbers, and are not computed."""
    joined: dict[str, tuple[str, str]] = {}
    """Tensors of a layer that a file may have in two parts, by the tensor that they make along its second dimension."""
    rows_of_one: tuple[str, ...] = ()
    """Tensors of a layer that a file has as a vector, and the model as a matrix of one row."""
    switches: Names = {}
    """Keys of the configuration that are true or false, by the metadata that give them. They are false by default."""
    has_latents: bool = False
    """Whether keys and values are made of latent ones (DeepSeek's MLA), so that their widths differ."""


ROWS: Final = {
    "bert": Row(
        model_type="bert",
        encodes=True,
        config=_ENCODER,
        tables={**_EMBEDDINGS, "position_embd": "embeddings.position_embeddings"},
        prefix="encoder.layer.",
        layers={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
    ),
    "nomic-bert": Row(
        model_type="nomic_bert",
        encodes=True,
        config={**_ENCODER, "rope.freq_base": "rope_theta"},
        tables=_EMBEDDINGS,
        prefix="layers.",
        layers={
            "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn_output": "self_attn.o_proj",
            "attn_output_norm": "post_attention_layernorm",
            **_GATED,
            "layer_output_norm": "post_mlp_layernorm",
        },
    ),
    "gemma-embedding": Row(
        model_type="gemma3_text",
        encodes=True,
        config=_GEMMA3,
        tables={**_TABLES, **_DENSE},
        layers=_GEMMA3_LAYERS,
        converted="norms",
        values={"use_bidirectional_attention": True},
        full_every=6,
    ),
    "gemma3": Row(
        model_type="gemma3_text",
        config={**_GEMMA3, "final_logit_softcapping": "final_logit_softcapping"},
        layers=_GEMMA3_LAYERS,
        converted="norms",
        full_every=6,
        scalings=("linear",),
        wide_at=62,  # 27B; source: llama.cpp, src/models/gemma3.cpp, `f_attention_scale`
    ),
    "gemma": Row(
        model_type="gemma", config=_WIDE, layers=_LLAMA, converted="norms",
    ),
    "granite": Row(
        model_type="granite", config={**_RMS, **_SCALES}, layers=_LLAMA, converted="permuted",
    ),
    "olmo2": Row(
        model_type="olmo2", config=_RMS, layers={**_ATTENTION, **_GATED, **_HEAD_NORMS, **_POST_NORMS},
        refused=("attention.sliding_window",),  # OLMo 3
    ),
    "smollm3": Row(
        model_type="smollm3", config=_RMS, layers=_LLAMA, converted="permuted",
    ),
    "llama": Row(
        model_type="llama", config=_WIDE, layers=_LLAMA, converted="permuted",
        present={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"},
        scalings=("llama3", "linear", "yarn"),
    ),
    "mistral3": Row(
        model_type="ministral3", config=_WIDE, layers=_LLAMA, converted="permuted", scalings=("yarn",), has_temperature=True,
    ),
    "phi2": Row(
        model_type="phi",
        config={**_CAUSAL, "attention.layer_norm_epsilon": "layer_norm_eps"},
        tables={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        layers={
            **_ATTENTION, "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attn_output": "self_attn.dense", "attn_norm": "input_layernorm",
            "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
        },
        is_partial=True,
    ),
    "command-r": Row(
        model_type="cohere", config=_LAYER,
        layers={**_ATTENTION, **_GATED, **_HEAD_NORMS, "attn_norm": "input_layernorm"},
        present={"use_qk_norm": "blk.0.attn_q_norm.weight", "attention_bias": "blk.0.attn_q.bias"},
    ),
    "cohere2": Row(
        model_type="cohere2", config={**_LAYER, "attention.sliding_window": "sliding_window"},
        layers={**_ATTENTION, **_GATED, "attn_norm": "input_layernorm"},
        full_every=4,
    ),
    "glm4": Row(
        model_type="glm4", config=_WIDE,
        layers={
            **_ATTENTION, **_NORMS, "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
            "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
        },
        present={"attention_bias": "blk.0.attn_q.bias"},
        is_partial=True,
        refused=("rope.dimension_sections", "nextn_predict_layers"),  # GLM-4V and GLM-OCR
    ),
    "exaone4": Row(
        model_type="exaone4", config={**_WIDE, "attention.sliding_window": "sliding_window"},
        layers={**_ATTENTION, **_GATED, **_HEAD_NORMS, **_POST_NORMS},
        values={"sliding_window": None},
        full_every=4,
        scalings=("llama3",),
        refused=("nextn_predict_layers",),  # EXAONE 4.5
    ),
    "ernie4_5": Row(
        model_type="ernie4_5", config=_WIDE, layers=_LLAMA, present={"use_bias": "blk.0.attn_q.bias"},
    ),
    "hunyuan-dense": Row(
        model_type="hunyuan_v1_dense", config=_WIDE,
        layers={**_LLAMA, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        present={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "deepseek2": Row(
        model_type="deepseek_v2",
        config={
            **_SIZES,
            "rope.freq_base": "rope_theta",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
        },
        layers={**_LATENTS, **_EXPERTS, **_GATED, **_NORMS},
        values={
            "q_lora_rank": None, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        },
        joined={"attn_kv_b": ("attn_k_b", "attn_v_b"), **_JOINED_EXPERTS},
        has_latents=True,
        scalings=("yarn",),
        refused=(
            "expert_weights_norm",  # the library does not divide a softmax again
            "attention.temperature_scale",  # Mistral Large 3
            "nextn_predict_layers",
        ),
    ),
    "qwen2": Row(
        model_type="qwen2", config=_RMS, layers=_LLAMA, scalings=("linear", "yarn"),
    ),
    "qwen2moe": Row(
        model_type="qwen2_moe",
        config={**_RMS, **_EXPERT_SIZES, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        layers={
            **_ATTENTION, **_NORMS, **_ROUTED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
            "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
            "ffn_down_shexp": "mlp.shared_expert.down_proj",
        },
        joined=_JOINED_EXPERTS,
        rows_of_one=("ffn_gate_inp_shexp.weight",),
        scalings=("linear", "yarn"),
    ),
    "qwen3": Row(
        model_type="qwen3", config=_WIDE, layers={**_LLAMA, **_HEAD_NORMS},
        present={"attention_bias": "blk.0.attn_q.bias"}, scalings=("linear", "yarn"),
    ),
    "qwen3moe": Row(
        model_type="qwen3_moe", config={**_WIDE, **_EXPERT_SIZES},
        layers={**_ATTENTION, **_HEAD_NORMS, **_NORMS, **_ROUTED},
        values={"norm_topk_prob": True},
        present={"attention_bias": "blk.0.attn_q.bias"},
        joined=_JOINED_EXPERTS,
        scalings=("linear", "yarn"),
    ),
    "gemma2": Row(
        model_type="gemma2",
        config={
            **_GEMMA2,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        layers={**_ATTENTION, **_GATED, **_POST_NORMS, "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"},
        converted="norms",
        values={"sliding_window": 4096},
        full_every=2,
        wide_at=46,  # 27B; source: llama.cpp, src/models/gemma2.cpp, `f_attention_scale`
    ),
    "phi3": Row(
        model_type="phi3", config={**_RMS, "attention.sliding_window": "sliding_window"},
        layers={
            **_NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        is_partial=True,
        scalings=("longrope",),
    ),
    "starcoder2": Row(
        model_type="starcoder2", config={**_CAUSAL, "attention.layer_norm_epsilon": "norm_epsilon"},
        layers={**_ATTENTION, **_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "stablelm": Row(
        model_type="stablelm", config={**_CAUSAL, "attention.layer_norm_epsilon": "layer_norm_eps"}, layers=_LLAMA,
        present={"use_qkv_bias": "blk.0.attn_q.bias"},
        switches={"use_parallel_residual": "use_parallel_residual"},
        is_partial=True,
    ),
}  # fmt: skip
"""The rows by the name of the architecture, `general.architecture`."""


XLM_ROBERTA: Final = msgspec.structs.replace(ROWS["bert"], model_type="xlm-roberta", first_position=2)
"""A file says that it is `bert`; only its vocabulary tells."""


DEEPSEEK_V3: Final = msgspec.structs.replace(
    ROWS["deepseek2"],
    model_type="deepseek_v3",
    layers={**ROWS["deepseek2"].layers, "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    switches={"expert_weights_norm": "norm_topk_prob"},
    refused=ROWS["deepseek2"].refused[1:],
)
"""A file says that it is `deepseek2`, as DeepSeek V2's do; only how experts are chosen tells."""
MIXTRAL: Final = msgspec.structs.replace(
    ROWS["llama"],
    model_type="mixtral",
    config={**ROWS["llama"].config, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    layers={**_ATTENTION, **_NORMS, **_ROUTED},
    present={},
    joined=_JOINED_EXPERTS,
)
"""A file says that it is `llama`; only its experts tell."""
_SIGMOID: Final = 2
"""Source: gguf's `ExpertGatingFuncType`. Files of DeepSeek V2 lack it, or have that of softmax, 1."""


def find_row(fields: Mapping[str, Any]) -> Row | None:
    """Return the row for a file's metadata; None for an architecture that transformers' own table may have."""
    name = str(fields.get("general.architecture", ""))
    if name == "bert" and fields.get("tokenizer.ggml.model") == "t5":
        return XLM_ROBERTA
    if name == "deepseek2" and fields.get("deepseek2.expert_gating_func") == _SIGMOID:
        return DEEPSEEK_V3
    if name == "llama" and fields.get("llama.expert_count"):
        return MIXTRAL
    return ROWS.get(name)


def weight_rules(row: Row) -> tuple[tuple[str, ...], ...]:
    """Return the rules that rename a row's tensors, as in `ModelCard.weight_names`."""
    scaled: Names = {"rope_freqs": ()} if "llama3" in row.scalings else {}
    if "longrope" in row.scalings:
        scaled = {"rope_factors_long": (), "rope_factors_short": ()}
    rules = [_rule("^", name, "", names) for name, names in (*row.tables.items(), *scaled.items())]
    return tuple(
        rules + [_rule(r"^blk\.(\d+)\.", name, rf"{row.prefix}\1.", names) for name, names in row.layers.items()]
    )


def _rule(before: str, tensor: str, prefix: str, names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the rule of a tensor; its end, such as `.weight`, stays unless its name in the row has it."""
    several = (names,) if isinstance(names, str) else names
    end = "" if "." in tensor else "."
    return (rf"{before}{re.escape(tensor + end)}", *(f"{prefix}{name}{end}" for name in several))
