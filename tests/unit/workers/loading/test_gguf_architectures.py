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
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_generator
from tests.gguf_models import VOCABULARY, write_converted

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
OWN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma": ("Gemma", {"head_dim": 12}, {"attention.key_length": 12, "attention.value_length": 12}),
    "granite": ("Granite", SCALES, WRITTEN),
    "olmo2": ("Olmo2", {}, {}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}, {}),
}
IDS = torch.tensor([[2, 17, 140, 33, 90, 5, 61, 203, 7, 8]])


def write(path: Path, name: str, *, pre: str = "gpt-2", **metadata: Any) -> tuple[Path, Any]:
    family, values, written = OWN[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**SIZES, **values)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return write_converted(path, name, model, {**METADATA, **written, **metadata}, pre=pre), model


def test_every_row_is_tested() -> None:
    assert OWN.keys() == ROWS.keys()


@pytest.mark.parametrize("name", OWN)
def test_logits_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    path, model = write(tmp_path / "m.gguf", name)
    card = read_gguf_card("m", str(path), str(tmp_path))
    assert card.architecture == name
    runner = load_generator(
        card, "cpu", "float32", Generation(kv_cache_bytes=1 << 22, weights="float32"), lambda *_: None
    )
    runner.model.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(runner.model(IDS).logits, model(IDS).logits, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("granite", "rope.scaling.type", "yarn"), ("olmo2", "attention.sliding_window", 32)],
)
def test_metadata_that_would_be_ignored_are_refused_by_name(tmp_path: Path, name: str, field: str, value: Any) -> None:
    path, _ = write(tmp_path / "m.gguf", name, **{field: value})
    with pytest.raises(ModelLoadFailed, match=f"its GGUF metadata set {name}.{field} to {value!r}"):
        read_gguf_card("m", str(path), str(tmp_path))


def test_each_digit_is_a_word_where_the_vocabulary_was_made_so(tmp_path: Path) -> None:
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    for pre, expected in (("refact", digits), ("gpt-2", pre_tokenizers.ByteLevel(False))):
        path, _ = write(tmp_path / "m.gguf", "granite", pre=pre)
        tokenizer = Tokenizer.from_file(read_gguf_card("m", str(path), str(tmp_path)).tokenizer_file)
        for text in ("in 2024, there", " 17 other  9"):
            assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
