"""GGUF files of DeepSeek V2 and V3 give the logits of the model that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from sie.catalog.gguf_file import read_gguf_card
from sie.config.generation_settings import Generation
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_generator
from tests.gguf_models import VOCABULARY, apart, write_converted

HEADS, LATENT, PLAIN, ROTATED, VALUES = 4, 16, 12, 8, 10
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 64, "rope_theta": 700.0, "q_lora_rank": None,
    "kv_lora_rank": LATENT, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTATED, "v_head_dim": VALUES,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
METADATA = {
    "context_length": 64, "embedding_length": 32, "block_count": 3, "feed_forward_length": 48, "rope.freq_base": 700.0,
    "rope.dimension_count": ROTATED, "attention.head_count": HEADS, "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.kv_lora_rank": LATENT, "leading_dense_block_count": 1, "expert_feed_forward_length": 20,
    "expert_count": 8, "expert_used_count": 3, "expert_shared_count": 2, "expert_weights_scale": 1.5,
}  # fmt: skip
WIDTHS = {"attention.key_length": PLAIN + ROTATED, "attention.value_length": VALUES, "attention.head_count_kv": HEADS}
"""Those of files that have keys and values in one tensor."""
SPLIT_WIDTHS = {
    "attention.key_length": LATENT + ROTATED, "attention.value_length": LATENT, "attention.head_count_kv": 1,
    "attention.key_length_mla": PLAIN + ROTATED, "attention.value_length_mla": VALUES,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 14}
GROUPS_WRITTEN = {"expert_group_count": 4, "expert_group_used_count": 2, "attention.q_lora_rank": 14}
YARN = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
YARN_WRITTEN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 8,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}  # fmt: skip
V3 = {"expert_gating_func": 2, "expert_weights_norm": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "V2 Lite": ("DeepseekV2Config", {}, WIDTHS),
    "V2": (
        "DeepseekV2Config",
        {**GROUPS, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
        {**SPLIT_WIDTHS, **GROUPS_WRITTEN, **YARN_WRITTEN, "expert_gating_func": 1},
    ),
    "V3": (
        "DeepseekV3Config",
        {**GROUPS, "rope_parameters": YARN},
        {**SPLIT_WIDTHS, **GROUPS_WRITTEN, **YARN_WRITTEN, **V3},
    ),
    "V3 not normalised": ("DeepseekV3Config", {"norm_topk_prob": False}, {**WIDTHS, "expert_gating_func": 2}),
}
IDS = torch.tensor([[2, 17, 140, 33, 90, 5, 61, 203, 7, 8, 9, 44]])


def write(path: Path, case: str, *, pre: str = "deepseek-llm", **metadata: Any) -> tuple[Path, Any]:
    family, values, written = CASES[case]
    torch.manual_seed(5)
    config = getattr(transformers, family)(**{**SIZES, **values})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            size = 1.0 if name.endswith("e_score_correction_bias") else 0.2
            weight.add_(torch.randn_like(weight) * size)
    weights = to_llama_cpp(model.state_dict(), is_split="attention.key_length_mla" in written)
    fields = {**METADATA, **written, **metadata}
    return write_converted(path, "deepseek2", model, fields, pre=pre, weights=weights), model


def to_llama_cpp(weights: dict[str, torch.Tensor], *, is_split: bool) -> dict[str, torch.Tensor]:
    """Return the weights as the converter reads and divides them. Source: llama.cpp, conversion/deepseek.py."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in apart(weights).items():
        if name.endswith("e_score_correction_bias"):
            found[name.replace("_bias", ".bias")] = weight
        elif name.endswith("kv_b_proj.weight") and is_split:
            keys, values = weight.view(HEADS, PLAIN + VALUES, LATENT).split([PLAIN, VALUES], 1)
            found[name.replace("kv_b", "k_b")] = keys.transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = values
        else:
            found[name] = weight
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_model(tmp_path: Path, case: str) -> None:
    path, model = write(tmp_path / "m.gguf", case)
    card = read_gguf_card("m", str(path), str(tmp_path))
    settings = Generation(kv_cache_bytes=1 << 22, weights="float32")
    runner = load_generator(card, "cpu", "float32", settings, lambda *_: None)
    runner.model.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(runner.model(IDS).logits, model(IDS).logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("case", "field", "value", "reason"),
    [
        ("V2", "expert_weights_norm", True, "is not computed"),
        ("V3", "expert_weights_norm", 1, "is neither true nor false"),
        ("V3", "attention.temperature_scale", 0.5, "is not computed"),
        ("V2 Lite", "rope.dimension_count", 20, "is not a part of the width of its keys, 20"),
        ("V2", "expert_group_count", 3, "does not divide its experts, 8"),
        ("V2", "expert_group_used_count", 5, "is more than its groups of experts, 4"),
        ("V3", "expert_used_count", 5, "is more than a token may choose among, 4"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, case: str, field: str, value: Any, reason: str
) -> None:
    path, _ = write(tmp_path / "m.gguf", case, **{field: value})
    with pytest.raises(
        ModelLoadFailed, match=rf"its GGUF metadata set deepseek2\.{field} to {value!r}, which {reason}"
    ):
        read_gguf_card("m", str(path), str(tmp_path))


def test_keys_without_values_are_missed(tmp_path: Path) -> None:
    path, _ = write(tmp_path / "m.gguf", "V2")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v_b.weight", b"blk.1.attn_k_c.weight"))
    with pytest.raises(ModelLoadFailed, match=r"its tensor 'blk\.1\.attn_k_c\.weight' is not one"):
        read_gguf_card("m", str(path), str(tmp_path))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-llm", ["In", "Ġ", "1", "2", "3", "4", "ä¸Ģ", "!", "a", "Ġ"]),
        ("deepseek-coder", ["In", "Ġ", "1", "2", "3", "4", "ä¸Ģ", "!", "a", "Ġ"]),
        ("deepseek-v3", ["In", "Ġ", "123", "4", "ä¸Ģ", "!a", "Ġ"]),
    ],
)
def test_texts_are_split_as_the_vocabulary_says(tmp_path: Path, pre: str, words: list[str]) -> None:
    path, _ = write(tmp_path / "m.gguf", "V2 Lite", pre=pre)
    tokenizer = Tokenizer.from_file(read_gguf_card("m", str(path), str(tmp_path)).tokenizer_file)
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("In 1234\u4e00!a ")] == words
