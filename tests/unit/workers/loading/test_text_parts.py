"""The language model of checkpoints that also read images gives the logits of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sie.catalog.cards import make_card
from sie.catalog.checkpoint_card import check_before_weights
from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.values.errors import ModelLoadFailed
from sie.workers.loading.loader import load_generator
from tests.gli_models import change_json, save_tokenizer

TEXT = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 220, "sliding_window": 6, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
IMAGES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
GEMMA4 = {
    **TEXT, "global_head_dim": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA4_IMAGES = {**IMAGES, "head_dim": 8, "global_head_dim": 8, "num_key_value_heads": 4}
SMALL = {
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 220,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma 3, translategemma": ("Gemma3", {**TEXT, "query_pre_attn_scalar": 8}, {"mm_tokens_per_image": 4}),
    "Gemma 4": ("Gemma4", {**GEMMA4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}, {}),
    "Gemma 4, small": ("Gemma4", {**GEMMA4, **SMALL}, {}),
    "Gemma 4, experts": (
        "Gemma4", {**GEMMA4, **EXPERTS, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                   "use_bidirectional_attention": "vision"}, {},
    ),
    "Mistral 3": ("Mistral3", {**TEXT, "model_type": "mistral", "sliding_window": None}, {"tie_word_embeddings": False}),
    "SmolVLM": ("SmolVLM", {**TEXT, "model_type": "llama", "sliding_window": None}, {}),
}  # fmt: skip
IDS = [2, 17, 140, 33, 90, 5, 61, 203, 7, 8]


def save_whole(directory: Path, name: str) -> transformers.PreTrainedModel:
    family, text, values = WHOLE[name]
    torch.manual_seed(3)
    images = GEMMA4_IMAGES if family == "Gemma4" else IMAGES
    images = {**IMAGES, "model_type": "pixtral", "head_dim": 8} if family == "Mistral3" else images
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=images, **values)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return model


def rename(directory: Path, old: str, new: str) -> None:
    """Write the weights under the names of another version of the library."""
    weights = load_file(directory / "model.safetensors")
    save_file({new + name.removeprefix(old) if name.startswith(old) else name: weight.clone() for name, weight in weights.items()},
              directory / "model.safetensors", {"format": "pt"})  # fmt: skip


def logits_of(directory: Path) -> torch.Tensor:
    card = make_card(ModelSpec(id="m", directory=str(directory)), str(directory))
    assert "generate" in card.outputs
    settings = Generation(kv_cache_bytes=1 << 22, weights="float32")
    runner = load_generator(card, "cpu", "float32", settings, lambda *_: None)
    runner.model.set_attn_implementation("sdpa")
    assert not [name for name, _ in runner.model.named_parameters() if "vision" in name]
    with torch.no_grad():
        return runner.model(torch.tensor([IDS])).logits


@pytest.mark.parametrize("name", WHOLE)
def test_logits_are_those_of_the_whole_model(tmp_path: Path, name: str) -> None:
    model = save_whole(tmp_path, name)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [("Gemma 3, translategemma", "language_model.model.", "model.language_model."),
     ("Gemma 4", "model.language_model.", "language_model.model.")],
)  # fmt: skip
def test_the_names_of_both_layouts_are_read(tmp_path: Path, name: str, old: str, new: str) -> None:
    model = save_whole(tmp_path, name)
    rename(tmp_path, old, new)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits
    torch.testing.assert_close(logits_of(tmp_path), expected, atol=2e-5, rtol=2e-5)


def test_audio_beside_images_is_left_out_too(tmp_path: Path) -> None:
    save_whole(tmp_path, "Gemma 4")
    change_json(tmp_path / "config.json", audio_config={"model_type": "gemma4_audio"})
    check_before_weights("m", str(tmp_path))
    assert make_card(ModelSpec(id="m"), str(tmp_path)).kind == "generator"


def test_other_models_of_images_stay_refused(tmp_path: Path) -> None:
    save_whole(tmp_path, "SmolVLM")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen2_5_vl"}))
    with pytest.raises(ModelLoadFailed, match="of a kind that is not served yet"):
        make_card(ModelSpec(id="m"), str(tmp_path))
