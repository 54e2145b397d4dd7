"""Makes the configuration of a model from a GGUF file's metadata and tensor table, by a row of `gguf_architectures`.

Every value is checked here, so that the error names its field.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from sie.catalog.files import refuse
from sie.catalog.gguf_architectures import Row, weight_rules
from sie.catalog.gguf_contents import GgufContents

_MOST: Final = 1 << 24
"""Over the size of any model's vocabulary, context or layer."""
_NEEDED: Final = (
    "context_length", "block_count", "feed_forward_length", "embedding_length", "attention.head_count",
    "attention.kv_lora_rank", "expert_count", "expert_used_count", "expert_shared_count", "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)  # fmt: skip
"""Metadata that a file must have, where its architecture's row has them."""
_POSITIVE: Final = (
    *_NEEDED, "attention.head_count_kv", "attention.q_lora_rank", "expert_group_count", "expert_group_used_count",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.factor",
)  # fmt: skip
_TOKENS: Final = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_FACTORS: Final = "rope_freqs.weight"
_LONG_FACTORS: Final = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
_LLAMA3_LOW: Final = 1.0
_LLAMA3_HIGH: Final = 4.0
_LLAMA3_CONTEXT: Final = 8192
_TOLERANCE: Final = 1e-3


def read_config(file: GgufContents, row: Row) -> dict[str, Any]:
    """Return the content of a config.json. Raises ModelLoadFailed that names the field or tensor at fault."""
    reader = _Fields(file)
    for key in row.refused:
        if reader.find(key):
            raise reader.refuse(key, "is not computed")
    if reader.find("attention.causal") not in (None, not row.encodes):
        raise reader.refuse("attention.causal", "is not computed")
    _check_tensors(file, row)
    config = {"model_type": row.model_type, **row.values, **_from_fields(reader, row), **_from_tensors(file, row)}
    config |= _token_ids(file, config["vocab_size"])
    if row.first_position:  # the library counts positions from the padding's number
        config["pad_token_id"] = row.first_position - 1
    if row.full_every:
        config["layer_types"] = _layer_types(reader, row, config)
    if config.get("sliding_window") == 0:
        config["sliding_window"] = None
    if row.has_latents:
        config |= {**_latent_widths(reader, config), **_expert_choice(reader, config)}
    else:
        _check_widths(reader, row, _head_width(config))
    if row.is_partial:
        config["partial_rotary_factor"] = reader.needed("rope.dimension_count") / _head_width(config)
    if config["num_hidden_layers"] == row.wide_at:
        config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    scaling = _scaling(reader, row, config)
    if scaling.get("rope_type") == "longrope":  # Phi-3's class has the number here
        config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    if scaling and "rope.freq_base_swa" in row.config:  # layers with a window keep their positions
        return {**config, "rope_scaling": scaling}
    return {**config, "rope_parameters": {"rope_theta": config.pop("rope_theta"), **scaling}} if scaling else config


def _from_fields(reader: _Fields, row: Row) -> dict[str, Any]:
    """Return the keys that the metadata give, or llama.cpp's defaults for those which a file lacks."""
    found: dict[str, Any] = {}
    wanted: list[str] = []
    for key, known in row.config.items():
        names = [known] if isinstance(known, str) else known
        wanted += names
        value = reader.number(key, needed=key in _NEEDED or key.endswith("_epsilon"))
        found |= dict.fromkeys(names, value) if value is not None else {}
    found |= {str(known): reader.switch(key) for key, known in row.switches.items()}
    defaults = _defaults(found["hidden_size"], found["num_attention_heads"])
    return {**{key: value for key, value in defaults.items() if key in wanted}, **found}


def _defaults(width: int, heads: int) -> dict[str, Any]:
    """Source: llama.cpp, src/llama-model.cpp, `llama_model_base::load_hparams`."""
    own = width // heads
    return {"rope_theta": 10_000.0, "num_key_value_heads": heads, "head_dim": own, "query_pre_attn_scalar": own}


def _from_tensors(file: GgufContents, row: Row) -> dict[str, Any]:
    shapes = file.shapes
    found: dict[str, int] = {key: tensor in shapes for key, tensor in row.present.items()}
    if "position_embd" in row.tables:
        found["max_position_embeddings"] = _rows(file, "position_embd.weight") + row.first_position
    if "token_types" in row.tables:
        found["type_vocab_size"] = _rows(file, "token_types.weight")
    return {
        **found,
        "vocab_size": _rows(file, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _token_ids(file: GgufContents, vocabulary: int) -> dict[str, int | None]:
    found: dict[str, Any] = {known: file.fields.get(f"tokenizer.ggml.{key}_token_id") for key, known in _TOKENS.items()}
    return {key: one if isinstance(one, int) and 0 <= one < vocabulary else None for key, one in found.items()}


def _head_width(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _check_widths(reader: _Fields, row: Row, width: int) -> None:
    """Refuse heads whose parts have widths that the model here cannot have."""
    if not width:
        raise reader.refuse("attention.head_count", "is more than it has values for")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        is_other = reader.number(key) not in (None, width)
        if is_other and not (row.is_partial and key == "rope.dimension_count"):
            raise reader.refuse(key, f"is not the width of its heads, {width}")


def _latent_widths(reader: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the widths of heads whose keys and values are made of latent ones.

    In files since April 2025, `key_length` and `value_length` are the widths of the latent keys and values, which have
    one head; the keys with `_mla` have the widths of heads.
    Source: llama.cpp, conversion/deepseek.py, and src/llama-hparams.cpp, `n_embd_head_k_mla`.
    """
    ends = "_mla" if reader.find("attention.key_length_mla") is not None else ""
    key, value = (reader.needed(f"attention.{name}_length{ends}") for name in ("key", "value"))
    rotated = reader.needed("rope.dimension_count")
    if rotated >= key:
        raise reader.refuse("rope.dimension_count", f"is not a part of the width of its keys, {key}")
    return {
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": value,
        "num_key_value_heads": config["num_attention_heads"],
    }  # fmt: skip


def _expert_choice(reader: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return how a token's experts are chosen. A file without groups of experts lets it choose among all of them."""
    count, groups, used = (config[name] for name in ("n_routed_experts", "n_group", "topk_group"))
    if count % groups:
        raise reader.refuse("expert_group_count", f"does not divide its experts, {count}")
    if used > groups:
        raise reader.refuse("expert_group_used_count", f"is more than its groups of experts, {groups}")
    most = count // groups * used
    if config["num_experts_per_tok"] > most:
        raise reader.refuse("expert_used_count", f"is more than a token may choose among, {most}")
    return {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


class _Fields:
    """The metadata of one architecture."""

    def __init__(self, file: GgufContents) -> None:
        self.file = file

    def name(self, key: str) -> str:
        return f"{self.file.architecture}.{key}"

    def find(self, key: str) -> Any:
        return self.file.fields.get(self.name(key))

    def refuse(self, key: str, reason: str) -> Exception:
        return refuse(
            self.file.model_id, f"its GGUF metadata set {self.name(key)} to {self.find(key)!r}, which {reason}"
        )

    def number(self, key: str, *, needed: bool = False) -> int | float | None:
        value = self.find(key)
        if value is None and not needed:
            return None
        if value is None:
            raise refuse(self.file.model_id, f"its GGUF metadata have no {self.name(key)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "is not one number")
        is_positive = value > 0 or (value == 0 and key not in _POSITIVE)
        if not is_positive or not math.isfinite(value) or (isinstance(value, int) and value > _MOST):
            raise self.refuse(key, "is out of range")
        return value

    def switch(self, key: str) -> bool:
        value = self.find(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "is neither true nor false")
        return bool(value)

    def needed(self, key: str) -> int | float:
        value = self.number(key, needed=True)
        assert value is not None
        return value


def _check_tensors(file: GgufContents, row: Row) -> None:
    parts = [rf"^blk\.\d+\.{part}\." for parts in row.joined.values() for part in parts]
    patterns = [re.compile(pattern) for pattern in (*parts, *(pattern for pattern, *_ in weight_rules(row)))]
    for tensor in file.shapes:
        if not any(pattern.match(tensor) for pattern in patterns):
            reason = f"is not one that models of its architecture {file.architecture!r} have here"
            raise refuse(file.model_id, f"its tensor {tensor!r} {reason}")


def _rows(file: GgufContents, tensor: str) -> int:
    shape = file.shapes.get(tensor, ())
    if len(shape) != 2 or not 0 < shape[0] <= _MOST:
        raise refuse(file.model_id, f"its tensor {tensor!r} is missing or has no rows: its shape is {list(shape)}")
    return shape[0]


def _layer_types(reader: _Fields, row: Row, config: dict[str, Any]) -> list[str]:
    """Return whether each layer attends to all positions or to a window."""
    count = config["num_hidden_layers"]
    listed = reader.find("attention.sliding_window_pattern")
    if isinstance(listed, list) and len(listed) != count:
        raise reader.refuse("attention.sliding_window_pattern", f"does not have a value for each of {count} layers")
    if not reader.find("attention.sliding_window") and not row.values.get("sliding_window"):
        slides = [False] * count
    elif isinstance(listed, list):
        slides = [bool(value) for value in listed]
    else:
        every = listed if isinstance(listed, int) and listed > 0 else row.full_every
        slides = [(layer + 1) % every != 0 for layer in range(count)]
    return ["sliding_attention" if is_one else "full_attention" for is_one in slides]


def _scaling(reader: _Fields, row: Row, config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary positions, in the library's form; empty for plain ones."""
    if reader.find("rope.scale_linear") not in (None, 1.0):  # the key of files before rope.scaling
        raise reader.refuse("rope.scale_linear", "is not computed")
    kind = reader.find("rope.scaling.type") or "none"
    if kind != "none" and kind not in row.scalings:
        raise reader.refuse("rope.scaling.type", "is not computed")
    scaling = _temperature(reader, config) if row.has_temperature else {}
    if _FACTORS in reader.file.shapes:
        return {**_llama3_scaling(reader, config), **scaling}
    if "longrope" in row.scalings:
        return _longrope(reader, config)
    if kind == "none":
        return {"rope_type": "default", **scaling} if scaling else {}
    scaling |= {"rope_type": kind, "factor": reader.needed("rope.scaling.factor")}
    if kind == "linear":
        return scaling
    log_scale = reader.number("rope.scaling.yarn_log_multiplier")
    if log_scale and row.has_latents:
        # Such files have a tenth of the library's number. Source: llama.cpp, TAG_DEEPSEEK2_YARN_LOG_MUL_FIX.
        scaling |= {"mscale": 10 * log_scale, "mscale_all_dim": 10 * log_scale}
    elif log_scale:
        scaling |= {"mscale": 1.0, "mscale_all_dim": log_scale}
    return {
        "beta_fast": reader.number("rope.scaling.yarn_beta_fast") or 32.0,
        "beta_slow": reader.number("rope.scaling.yarn_beta_slow") or 1.0,
        "original_max_position_embeddings": _original_context(reader, config),
        **scaling,
    }


def _longrope(reader: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling with factors for short and for long sequences; empty for a file without them.

    Source: llama.cpp, conversion/phi.py.
    """
    shapes = reader.file.shapes
    if not any(tensor in shapes for tensor in _LONG_FACTORS.values()):
        return {}
    for tensor in _LONG_FACTORS.values():
        if tensor not in shapes:
            raise refuse(reader.file.model_id, f"its tensor {tensor!r} is missing")
    factors = {key: reader.file.read_tensor(tensor).tolist() for key, tensor in _LONG_FACTORS.items()}
    own = reader.number("rope.scaling.attn_factor")
    original = _original_context(reader, config)
    return {
        "rope_type": "longrope", "original_max_position_embeddings": original, **factors,
        "factor": config["max_position_embeddings"] / original, **({"attention_factor": own} if own else {}),
    }  # fmt: skip


def _temperature(reader: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    scale = reader.number("attention.temperature_scale") or 0.0
    return {"llama_4_scaling_beta": scale, "original_max_position_embeddings": _original_context(reader, config)}


def _original_context(reader: _Fields, config: dict[str, Any]) -> int | float:
    return reader.number("rope.scaling.original_context_length") or config["max_position_embeddings"]


def _llama3_scaling(reader: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling of Llama 3 that gives a file's factors, one for each pair of a head's values.

    The file has only the factors; all models have the same limits. Source: llama.cpp, conversion/llama.py.
    """
    factors: list[float] = reader.file.read_tensor(_FACTORS).tolist()
    width = _head_width(config)
    original = reader.number("rope.scaling.original_context_length") or _LLAMA3_CONTEXT
    factor = max(1.0, *factors)
    for found, place in zip(factors, range(0, width, 2), strict=False):
        turns = original / (2 * math.pi * config["rope_theta"] ** (place / width))
        share = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
        if not math.isclose(found, 1 / ((1 - share) / factor + share), rel_tol=_TOLERANCE):
            break
    else:
        if len(factors) == width // 2:
            return {
                "rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original,
                "low_freq_factor": _LLAMA3_LOW, "high_freq_factor": _LLAMA3_HIGH,
            }  # fmt: skip
    raise refuse(reader.file.model_id, f"its tensor {_FACTORS!r} has other factors than Llama 3's scaling")
