"""GGUF files of architectures that transformers' own table lacks give the logits of the model that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers

from sie.catalog.gguf_architectures import ROWS
from sie.catalog.gguf_file import read_gguf_card
from sie.config.generation_settings import Generation
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.workers.generation.runner import TextGenerator
from sie.workers.loading.loader import load_generator
from tests.gguf_models import SPACE, VOCABULARY, add_sentence_pieces, apart, write_converted

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 2e-3, "rope_theta": 700.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
METADATA = {
    "context_length": 64, "embedding_length": 32, "block_count": 5, "feed_forward_length": 48, "rope.freq_base": 700.0,
    "rope.dimension_count": 16, "attention.head_count": 2, "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 2e-3,
}  # fmt: skip
SCALES = {"attention_multiplier": 0.4, "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_scaling": 2.0}
WRITTEN = {"attention.scale": 0.4, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 2.0}
LAYER_NORM = {"layer_norm_eps": 3e-3, "logit_scale": 0.3}
LAYER_NORM_WRITTEN = {"attention.layer_norm_epsilon": 3e-3, "logit_scale": 0.3}
GEMMA3 = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 4, "rope_theta": 700.0}
HEAD = {"attention.key_length": 12, "attention.value_length": 12, "rope.dimension_count": 12}
YARN = {
    "rope_type": "yarn", "rope_theta": 700.0, "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 30.0,
    "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
YARN_WRITTEN = {
    **HEAD, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 8,
    "rope.scaling.yarn_beta_fast": 30.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_log_multiplier": 0.5,
    "attention.temperature_scale": 0.3,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
EXPERTS_WRITTEN = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 20}
SHARED = {"shared_expert_intermediate_size": 28}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
GEMMA2 = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 4}
PARALLEL = {"partial_rotary_factor": 0.5, "layer_norm_eps": 3e-3}
OWN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}, {}),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, **SHARED}, {**EXPERTS_WRITTEN, "expert_shared_feed_forward_length": 28}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 12, "norm_topk_prob": True}, {**HEAD, **EXPERTS_WRITTEN}),
    "gemma2": ("Gemma2", {**GEMMA2, **CAPS}, {**HEAD, **CAPS, "attention.sliding_window": 4}),
    "phi3": (
        "Phi3",
        {"partial_rotary_factor": 0.75, "sliding_window": 4},
        {"rope.dimension_count": 12, "attention.sliding_window": 4},
    ),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 3e-3}, {"attention.layer_norm_epsilon": 3e-3}),
    "stablelm": ("StableLm", PARALLEL, {"attention.layer_norm_epsilon": 3e-3, "rope.dimension_count": 8}),
    "gemma": ("Gemma", {"head_dim": 12}, HEAD),
    "gemma3": ("Gemma3Text", GEMMA3, {**HEAD, "attention.sliding_window": 4}),
    "granite": ("Granite", SCALES, WRITTEN),
    "mistral3": ("Ministral3", {"rope_parameters": YARN, "head_dim": 12}, YARN_WRITTEN),
    "phi2": ("Phi", {"partial_rotary_factor": 0.25, **LAYER_NORM}, {**LAYER_NORM_WRITTEN, "rope.dimension_count": 4}),
    "command-r": ("Cohere", {**LAYER_NORM, "use_qk_norm": True}, LAYER_NORM_WRITTEN),
    "cohere2": ("Cohere2", {**LAYER_NORM, "sliding_window": 4}, {**LAYER_NORM_WRITTEN, "attention.sliding_window": 4}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.25}, {"rope.dimension_count": 4}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}, {}),
    "llama": ("Llama", {"head_dim": 12, "attention_bias": True}, HEAD),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "tie_word_embeddings": True}, {}),
    "hunyuan-dense": ("HunYuanDenseV1", {"head_dim": 12}, HEAD),
    "olmo2": ("Olmo2", {}, {}),
    "qwen3": ("Qwen3", {"head_dim": 12}, HEAD),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}, {}),
}
IDS = torch.tensor([[2, 17, 140, 33, 90, 5, 61, 203, 7, 8]])


def write(path: Path, name: str, *, pre: str = "gpt-2", **metadata: Any) -> tuple[Path, Any]:
    _, values, written = OWN[name]
    return write_model(path, name, {**SIZES, **values}, {**METADATA, **written, **metadata}, pre)


def write_model(
    path: Path, name: str, values: dict[str, Any], metadata: dict[str, Any], pre: str = "gpt-2", **extra: torch.Tensor
) -> tuple[Path, Any]:
    family = OWN[name][0]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    weights = {**apart(model.state_dict()), **{name.replace("__", "."): weight for name, weight in extra.items()}}
    return write_converted(path, name, model, metadata, pre=pre, weights=weights), model


def llama3_factors(width: int, theta: float, factor: float, original: float) -> torch.Tensor:
    """Source: llama.cpp, conversion/llama.py, `generate_extra_tensors`, with the limits 1 and 4."""
    lengths = 2 * torch.pi * theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    smooth = (original / lengths - 1) / 3
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(lengths < original / 4, 1.0, torch.where(lengths > original, factor, between)).float()


@pytest.mark.parametrize("name", ["llama", "exaone4"])
def test_llama_3_s_scaling_is_found_from_its_factors(tmp_path: Path, name: str) -> None:
    rotary = {
        "rope_type": "llama3", "rope_theta": 250_000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    own = {**SIZES, **OWN[name][1], "rope_parameters": rotary}
    metadata = {**METADATA, **OWN[name][2], "rope.freq_base": 250_000.0}
    if name == "exaone4":  # only layers with a window rotate
        slides = [True, False, True, True, False]
        types = [("full", "sliding")[is_one] + "_attention" for is_one in slides]
        own |= {"sliding_window": 4, "layer_types": types}
        metadata |= {"attention.sliding_window": 4, "attention.sliding_window_pattern": slides}
    width = metadata.get("attention.key_length", 16)
    factors = llama3_factors(width, 250_000.0, 32.0, 8192)
    assert len(set(factors.tolist())) > 2  # also some between the limits
    path, model = write_model(tmp_path / "m.gguf", name, own, metadata, rope__freqs__weight=factors)
    check_logits(tmp_path, name, path, model)
    other = factors.clone()
    other[-1] *= 0.5
    path, _ = write_model(tmp_path / "m.gguf", name, own, metadata, rope__freqs__weight=other)
    with pytest.raises(ModelLoadFailed, match=r"its tensor 'rope_freqs\.weight'"):
        read_gguf_card("m", str(path), str(tmp_path))


def test_older_files_of_phi_2_join_three_weights(tmp_path: Path) -> None:
    """Source: llama.cpp's `create_tensor_qkv` reads both."""
    own = {**SIZES, **OWN["phi2"][1], "num_key_value_heads": 2}
    metadata = {**METADATA, **OWN["phi2"][2], "attention.head_count_kv": 2}
    path, model = write_model(tmp_path / "m.gguf", "phi2", own, metadata)
    weights = {}
    for name, weight in model.state_dict().items():
        if ".q_proj." in name:
            parts = [model.state_dict()[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            weights[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            weights[name] = weight
    check_logits(tmp_path, "phi2", write_converted(path, "phi2", model, metadata, weights=weights), model)


def test_gemma_3_s_larger_models_scale_the_positions_of_full_layers(tmp_path: Path) -> None:
    own = {**SIZES, **GEMMA3, "layer_types": [*["sliding_attention"] * 4, "full_attention"]}
    own |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "final_logit_softcapping": 2.0}
    slides = [True, True, True, True, False]
    metadata = {
        **METADATA,
        **OWN["gemma3"][2],
        "attention.sliding_window_pattern": slides,
        "final_logit_softcapping": 2.0,
    }
    metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path, model = write_model(tmp_path / "m.gguf", "gemma3", own, metadata)
    check_logits(tmp_path, "gemma3", path, model)


def test_gemma_3_27b_scales_its_scores_by_the_width_of_the_model(tmp_path: Path) -> None:
    own = {**SIZES, **GEMMA3, "num_hidden_layers": 62, "query_pre_attn_scalar": 16, "hidden_size": 32}
    path, model = write_model(tmp_path / "m.gguf", "gemma3", own, {**METADATA, **OWN["gemma3"][2], "block_count": 62})
    check_logits(tmp_path, "gemma3", path, model)


def test_gemma_2_27b_scales_its_scores_by_the_width_of_the_model(tmp_path: Path) -> None:
    own = {**SIZES, **GEMMA2, "num_hidden_layers": 46, "query_pre_attn_scalar": 16}
    metadata = {**METADATA, **HEAD, "attention.sliding_window": 4, "block_count": 46}
    check_logits(tmp_path, "gemma2", *write_model(tmp_path / "m.gguf", "gemma2", own, metadata))


def test_mixtral_is_a_llama_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, "llama", ("Mixtral", {}, {}))
    own = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    metadata = {**METADATA, "expert_count": 4, "expert_used_count": 2}
    check_logits(tmp_path, "llama", *write_model(tmp_path / "m.gguf", "llama", own, metadata))


@pytest.mark.parametrize("values", [{"use_parallel_residual": True}, {"use_qkv_bias": True}])
def test_stablelm_s_forms(tmp_path: Path, values: dict[str, Any]) -> None:
    metadata = {**METADATA, **OWN["stablelm"][2], "use_parallel_residual": "use_parallel_residual" in values}
    own = {**SIZES, **PARALLEL, **values}
    check_logits(tmp_path, "stablelm", *write_model(tmp_path / "m.gguf", "stablelm", own, metadata))


LONG = {"long_factor": [float(place) for place in range(3, 9)], "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}
"""Factors for the half of twelve rotated values."""


@pytest.mark.parametrize("original", [4, 32])
def test_phi_3_has_factors_for_short_and_for_long_texts(tmp_path: Path, original: int) -> None:
    rotary = {"rope_type": "longrope", "rope_theta": 700.0, "original_max_position_embeddings": original, **LONG}
    own = {
        **SIZES,
        "partial_rotary_factor": 0.75,
        "rope_parameters": rotary,
        "original_max_position_embeddings": original,
    }
    metadata = {**METADATA, "rope.dimension_count": 12, "rope.scaling.original_context_length": original}
    metadata["attention.sliding_window"] = 0
    factors = {f"rope_factors_{name}__weight": torch.tensor(LONG[f"{name}_factor"]) for name in ("long", "short")}
    path, model = write_model(tmp_path / "m.gguf", "phi3", own, metadata, **factors)
    check_logits(tmp_path, "phi3", path, model)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions(tmp_path: Path, name: str, kind: str) -> None:
    rotary = {"rope_type": kind, "rope_theta": 700.0, "factor": 4.0}
    written = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    if kind == "yarn":
        rotary["original_max_position_embeddings"] = 16
        written["rope.scaling.original_context_length"] = 16
    own = {**SIZES, **OWN[name][1], "rope_parameters": rotary}
    path, model = write_model(tmp_path / "m.gguf", name, own, {**METADATA, **OWN[name][2], **written})
    check_logits(tmp_path, name, path, model)


def test_every_row_is_tested() -> None:
    others = {"deepseek2"}  # test_gguf_deepseek
    assert OWN.keys() | others == {name for name, row in ROWS.items() if not row.encodes}


@pytest.mark.parametrize("name", OWN)
def test_logits_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    check_logits(tmp_path, name, *write(tmp_path / "m.gguf", name))


def load(card: ModelCard) -> TextGenerator:
    settings = Generation(kv_cache_bytes=1 << 22, weights="float32")
    return load_generator(card, "cpu", "float32", settings, lambda *_: None)


def check_logits(tmp_path: Path, name: str, path: Path, model: Any) -> None:
    card = read_gguf_card("m", str(path), str(tmp_path))
    assert card.architecture == name
    runner = load(card)
    runner.model.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(runner.model(IDS).logits, model(IDS).logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("granite", "rope.scaling.type", "yarn"),
        ("olmo2", "attention.sliding_window", 32),
        ("qwen3", "attention.causal", False),
        ("llama", "rope.scale_linear", 0.5),
    ],
)
def test_metadata_that_would_be_ignored_are_refused_by_name(tmp_path: Path, name: str, field: str, value: Any) -> None:
    path, _ = write(tmp_path / "m.gguf", name, **{field: value})
    with pytest.raises(ModelLoadFailed, match=f"its GGUF metadata set {name}.{field} to {value!r}"):
        read_gguf_card("m", str(path), str(tmp_path))


@pytest.mark.parametrize("adds_space", [False, True])
def test_a_text_begins_with_a_space_only_where_the_file_says_so(tmp_path: Path, adds_space: bool) -> None:
    config = transformers.Ernie4_5Config(**{**SIZES, "vocab_size": 270})
    path = write_converted(
        tmp_path / "m.gguf", "ernie4_5", transformers.Ernie4_5ForCausalLM(config), METADATA,
        add_vocabulary=lambda writer: add_sentence_pieces(writer, adds_space=adds_space),
    )  # fmt: skip
    tokenizer = Tokenizer.from_file(read_gguf_card("m", str(path), str(tmp_path)).tokenizer_file)
    expected = [f"{SPACE}cat"] if adds_space else ["c", "at"]
    assert tokenizer.encode("cat sat", add_special_tokens=False).tokens == [*expected, f"{SPACE}sat"]
    assert tokenizer.decode([tokenizer.token_to_id(piece) for piece in (f"{SPACE}cat", f"{SPACE}sat")]) == (
        "cat sat" if adds_space else " cat sat"
    )


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("glm4", "In 12345", ["In", "Ġ", "123", "45"]),
        ("hunyuan-dense", "In 12345\u4e00!a", ["In", "Ġ", "123", "45", "ä¸Ģ", "!a"]),
        ("command-r", "In 123", ["In", "Ġ", "1", "2", "3"]),
        ("exaone4", "In 12345", ["In", "Ġ12345"]),
    ],
)
def test_texts_are_split_as_the_vocabulary_says(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    path, _ = write(tmp_path / "m.gguf", "qwen3", pre=pre)
    tokenizer = Tokenizer.from_file(read_gguf_card("m", str(path), str(tmp_path)).tokenizer_file)
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3", "attention.value_length", 10), ("phi2", "rope.freq_base", 0.0), ("llama", "block_count", "five"),
        ("granite", "rope.dimension_count", 8), ("llama", "rope.scaling.type", "longrope"),
    ],
)  # fmt: skip
def test_a_value_that_no_model_has_is_refused_by_name(tmp_path: Path, name: str, field: str, value: Any) -> None:
    path, _ = write(tmp_path / "m.gguf", name, **{field: value})
    with pytest.raises(ModelLoadFailed, match=f"its GGUF metadata set {name}.{field} to {value!r}, which is"):
        read_gguf_card("m", str(path), str(tmp_path))


def test_an_unknown_split_or_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = write(tmp_path / "m.gguf", "qwen3", pre="runes")
    with pytest.raises(ModelLoadFailed, match=r"tokenizer\.ggml\.pre to 'runes'"):
        read_gguf_card("m", str(path), str(tmp_path))
    path, _ = write_model(tmp_path / "m.gguf", "qwen3", SIZES, METADATA, rope__freqs__weight=torch.ones(8))
    with pytest.raises(ModelLoadFailed, match=r"its tensor 'rope_freqs\.weight' is not one that .* 'qwen3' have"):
        read_gguf_card("m", str(path), str(tmp_path))


def test_a_weight_that_the_model_has_not_is_refused_by_name(tmp_path: Path) -> None:
    bias = {"model__layers__1__self_attn__q_proj__bias": torch.ones(32)}
    path, _ = write_model(tmp_path / "m.gguf", "granite", {**SIZES, **SCALES}, {**METADATA, **WRITTEN}, **bias)
    with pytest.raises(
        ModelLoadFailed, match=r"'granite' does not have here: model\.layers\.1\.self_attn\.q_proj\.bias"
    ):
        load(read_gguf_card("m", str(path), str(tmp_path)))


def test_each_digit_is_a_word_where_the_vocabulary_was_made_so(tmp_path: Path) -> None:
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    for pre, expected in (("refact", digits), ("gpt-2", pre_tokenizers.ByteLevel(False))):
        path, _ = write(tmp_path / "m.gguf", "granite", pre=pre)
        tokenizer = Tokenizer.from_file(read_gguf_card("m", str(path), str(tmp_path)).tokenizer_file)
        for text in ("in 2024, there", " 17 other  9"):
            assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
