"""A quantised checkpoint is served as the plain weights that the format's own description makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from sie.catalog.cards import make_card
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import with_num_weights
from sie.config.generation_settings import Generation
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.workers.device.device import DtypeSetting
from sie.workers.loading.dequantised import open_dequantised
from sie.workers.loading.loader import load_encoder, load_generator
from sie.workers.runners.encode import EncodeRunner
from tests.gli_models import save_tokenizer
from tests.quantised_checkpoints import FORMATS, e4m3_values, packed, save_quantised, write_tensors
from tests.unit.workers.loading.test_direct_weights import _peak
from tests.unit.workers.loading.test_text_parts import save_whole

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 220, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_experts": 4, "head_dim": 16}
IDS = torch.tensor([[2, 17, 140, 33, 90, 5, 61, 203, 7, 8]])


def save(directory: Path, kind: str = "Llama", **changes: Any) -> Path:
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    auto = transformers.AutoModel if kind == "Bert" else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def card_of(directory: Path) -> ModelCard:
    return with_num_weights(make_card(ModelSpec(id="m", directory=str(directory)), str(directory)))


def load(directory: Path, dtype: DtypeSetting = "float32") -> Any:
    settings = Generation(kv_cache_bytes=1 << 22, weights="float32" if dtype == "float32" else "auto")
    return load_generator(card_of(directory), "cpu", dtype, settings, lambda *_: None).model


def assert_same(found: Any, expected: Any) -> None:
    for (name, weight), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(weight, other), name
    for model in (found, expected):
        model.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, expected(IDS).logits)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_format_s_description(llama: Path, tmp_path: Path, name: str) -> None:
    save_quantised(llama, tmp_path / "quantised", tmp_path / "plain", name)
    found = open_dequantised(card_of(tmp_path / "quantised"), torch.float32, CPU)
    assert found is not None
    for weight_name, weight in load_file(tmp_path / "plain" / "model.safetensors").items():
        np.testing.assert_array_equal(found[weight_name][...].numpy(), weight, weight_name)


@pytest.mark.parametrize("name", ["fp8 in blocks", "awq", "gptq 4 ordered", "packed int4 zeros", "bytes"])
def test_a_generator_is_that_of_the_plain_weights(llama: Path, tmp_path: Path, name: str) -> None:
    save_quantised(llama, tmp_path / "quantised", tmp_path / "plain", name)
    assert "generate" in card_of(tmp_path / "quantised").outputs
    assert_same(load(tmp_path / "quantised"), load(tmp_path / "plain"))


@pytest.mark.parametrize("name", ["fp8 in blocks", "gptq 4"])
def test_experts_are_joined_from_quantised_parts(tmp_path: Path, name: str) -> None:
    save(tmp_path / "source", "Qwen3Moe", **EXPERTS)
    save_quantised(tmp_path / "source", tmp_path / "quantised", tmp_path / "plain", name)
    assert_same(load(tmp_path / "quantised"), load(tmp_path / "plain"))


def test_the_experts_of_gpt_oss_are_dequantised(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    }
    save(tmp_path / "source", "GptOss", **sizes)
    chosen = ("gate_up_proj", "down_proj")
    save_quantised(tmp_path / "source", tmp_path / "quantised", tmp_path / "plain", "mxfp4", chosen=chosen)
    assert card_of(tmp_path / "quantised").num_weights == card_of(tmp_path / "plain").num_weights
    assert_same(load(tmp_path / "quantised"), load(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("whole", "name"), [("Gemma 3, translategemma", "packed int4"), ("Mistral 3", "fp8 by tensor")]
)
def test_the_language_model_of_a_checkpoint_that_reads_images_is_dequantised(
    tmp_path: Path, whole: str, name: str
) -> None:
    save_whole(tmp_path / "source", whole)
    save_quantised(tmp_path / "source", tmp_path / "quantised", tmp_path / "plain", name)
    assert_same(load(tmp_path / "quantised"), load(tmp_path / "plain"))


@pytest.mark.parametrize("name", ["compressed fp8 by output", "bytes"])
def test_an_encoder_is_that_of_the_plain_weights(tmp_path: Path, name: str) -> None:
    save(tmp_path / "source", "Bert", num_attention_heads=4)
    save_quantised(tmp_path / "source", tmp_path / "quantised", tmp_path / "plain", name, chosen="dense.weight")
    vectors = []
    for kind in ("quantised", "plain"):
        runner = load_encoder(card_of(tmp_path / kind), "cpu", "float32", lambda *_: None)
        assert isinstance(runner, EncodeRunner)
        vectors.append(runner.run_tokens([IDS[0].numpy().astype(np.int32)]))
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_weights_are_rounded_once_to_the_runner_s_format(llama: Path, tmp_path: Path) -> None:
    save_quantised(llama, tmp_path / "quantised", tmp_path / "plain", "gptq 4 ordered")
    card = card_of(tmp_path / "quantised")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).state_dict()
    for dtype in (torch.bfloat16, torch.float16):
        tensors = open_dequantised(card, dtype, CPU)
        assert tensors is not None
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(tensors[name][...], plain[name].to(dtype))


def test_the_number_of_weights_is_that_of_the_plain_ones(llama: Path, tmp_path: Path) -> None:
    for name in ("awq", "packed int4", "fp8 in blocks"):
        save_quantised(llama, tmp_path / name, tmp_path / "plain", name)
        extra = 14 if name == "fp8 in blocks" else 0  # its scales of inputs, which are not used
        assert card_of(tmp_path / name).num_weights == card_of(tmp_path / "plain").num_weights + extra


def test_inputs_need_not_fill_the_last_word_or_group(tmp_path: Path) -> None:
    weight = np.zeros((5, 43), np.float32)
    for bits, zeros in ((4, "packed"), (8, ""), (4, "bytes")):
        stored = packed(bits, 16, zeros=zeros)(weight, np.random.default_rng(3))
        directory = write_layer(tmp_path / f"{bits}{zeros}", stored.tensors, bits)
        tensors = open_dequantised(card(directory), torch.float32, CPU)
        assert tensors is not None
        np.testing.assert_array_equal(tensors["a.weight"][...].numpy(), stored.plain)


def test_large_weights_are_dequantised_in_pieces(tmp_path: Path) -> None:
    weight = np.zeros((1000, 1664), np.float32)
    stored = packed(4, 16)(weight, np.random.default_rng(3))
    tensors = open_dequantised(card(write_layer(tmp_path / "m", stored.tensors, 4)), torch.float32, CPU)
    assert tensors is not None
    np.testing.assert_array_equal(tensors["a.weight"][...].numpy(), stored.plain)


def test_a_load_holds_no_more_than_the_log_says(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1000, "head_dim": 64,
            "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    save(tmp_path / "source", "Llama", **wide)
    save_quantised(tmp_path / "source", tmp_path / "quantised", tmp_path / "plain", "packed int8")
    load(tmp_path / "quantised", "bfloat16")  # what the library imports and caches is not the load's
    own = card_of(tmp_path / "quantised")
    with _peak() as peak:
        tensors = open_dequantised(own, torch.bfloat16, CPU)
        assert tensors is not None
        kept = [tensor[...].clone() for tensor in tensors.values()]
        assert peak() < 2 * own.num_weights + 1024 * 512 * 2 + (48 << 20)
    assert kept


def card(directory: Path) -> ModelCard:
    return ModelCard(id="m", kind="generator", directory=str(directory), quantised="compressed-tensors")


def write_layer(directory: Path, tensors: dict[str, tuple[str, Any]], bits: int) -> Path:
    """Write a checkpoint of one layer with groups of 16 inputs."""
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 16}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": weights}}}  # fmt: skip
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"quantization_config": settings}))
    write_tensors(directory / "model.safetensors", {f"a.weight{end}": tensor for end, tensor in tensors.items()})
    return directory


@pytest.mark.parametrize(
    ("end", "values", "message"),
    [
        ("_shape", [5, 80], "'a.weight_shape' has the values \\[5, 80\\], which do not fit 'a.weight_packed'"),
        ("_shape", [1 << 40, 48], "'a.weight_shape' has the values"),
        ("_shape", [-5, -48], "'a.weight_shape' has the values"),
        ("_g_idx", [3] * 48, "'a.weight_g_idx' must have a number from 0 to 2 for each input"),
        ("_g_idx", [-7] * 48, "'a.weight_g_idx' must have a number from 0 to 2"),
        ("_g_idx", [0] * 47, "'a.weight_g_idx' must have a number from 0 to 2"),
    ],
)
def test_values_that_point_nowhere_are_refused_before_a_weight_is_read(
    tmp_path: Path, end: str, values: list[int], message: str
) -> None:
    stored = packed(4, 16)(np.zeros((5, 48), np.float32), np.random.default_rng(3))
    dtype = "I64" if end == "_shape" else "I32"
    tensors = {**stored.tensors, end: (dtype, np.array(values, np.int64 if dtype == "I64" else np.int32))}
    with pytest.raises(ModelLoadFailed, match=message) as caught:
        open_dequantised(card(write_layer(tmp_path / "m", tensors, 4)), torch.float32, CPU)
    assert caught.value.extras == {"error_class": "CONFIG"}


def test_groups_of_minus_one_are_in_order(tmp_path: Path) -> None:
    stored = packed(4, 16)(np.zeros((5, 48), np.float32), np.random.default_rng(3))
    tensors = {**stored.tensors, "_g_idx": ("I32", np.full(48, -1, np.int32))}
    found = open_dequantised(card(write_layer(tmp_path / "m", tensors, 4)), torch.float32, CPU)
    assert found is not None
    np.testing.assert_array_equal(found["a.weight"][...].numpy(), stored.plain)


def test_the_table_of_bytes_is_torch_s() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(numbers, e4m3_values())
