"""Models that are refused at load, with the reasons."""

from __future__ import annotations

import json

import pytest
import torch

from sie import native
from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.values.errors import BadRequest, ModelLoadFailed
from sie.workers.device import device
from sie.workers.generation.weight_formats import choose_format
from sie.workers.loading.loader import load_generator
from tests.generation_models import VOCABULARY, Stream, load, random_prompt, save, step
from tests.kernels import needs_kernels


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("bamba", "BambaForCausalLM"),
        ("bloom", "BloomForCausalLM"),
        ("codegen", "CodeGenForCausalLM"),
        ("falcon", "FalconForCausalLM"),
        ("gpt_neo", "GPTNeoForCausalLM"),
        ("gptj", "GPTJForCausalLM"),
        ("lfm2", "Lfm2ForCausalLM"),
        ("mamba", "MambaForCausalLM"),
        ("mpt", "MptForCausalLM"),
    ],
)
def test_models_that_bypass_the_attention_interface_are_refused_by_name(name, architecture, tmp_path):
    save(tmp_path / name, name)
    with pytest.raises(ModelLoadFailed, match=f"{architecture} cannot keep its keys and values in blocks: . of its"):
        load(tmp_path / name)


def test_a_hybrid_whose_settings_are_infinite_is_refused_for_its_layers(tmp_path):
    """As transformers before 5 wrote them; those that it writes now are in the test above."""
    path = save(tmp_path / "bamba", "bamba") / "config.json"
    path.write_text(path.read_text().replace('{\n      "__float__": "Infinity"\n    }', "Infinity"))
    assert "Infinity\n" in path.read_text()
    card = read_card(ModelSpec(id="m"), str(path.parent))
    with pytest.raises(ModelLoadFailed, match="BambaForCausalLM cannot keep its keys and values in blocks: 1 of its 3"):
        load_generator(card, "cpu", "float32", Generation(), lambda *_: None)


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        (
            {"rope_type": "ntk", "factor": 2.0},
            "its rope type 'ntk' is not one that transformers .* computes: default, dynamic,",
        ),
        ({"rope_type": "linear"}, r"transformers cannot read its config.json: .*'linear': {'factor'}"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 4}, r"cannot read its config.json: .*{'short_factor'}"),
    ],
)
def test_rotary_settings_that_the_library_cannot_follow_are_refused_by_name(rope, reason, tmp_path):
    path = save(tmp_path / "llama", "llama") / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "rope_parameters": {"rope_theta": 100.0, **rope}}))
    with pytest.raises(ModelLoadFailed, match=reason) as caught:
        load(path.parent)
    assert caught.value.extras == {"error_class": "CONFIG"}


def test_a_cache_without_room_is_refused_by_the_setting(tmp_path):
    save(tmp_path / "llama", "llama")
    with pytest.raises(ModelLoadFailed, match="kv_cache_bytes has room for 3 blocks of 3072 bytes"):
        load(tmp_path / "llama", kv_cache_bytes=10_000)


def test_blocks_are_no_more_than_all_choices_could_fill(load_tiny):
    runner, _ = load_tiny("llama")
    assert runner.block_tokens == 8
    assert runner.num_blocks == 16 * (256 // 8 + 1)


def test_blocks_are_what_their_memory_has_room_for(load_tiny):
    runner, _ = load_tiny("llama", kv_cache_bytes=100_000)
    block_bytes = 8 * 3 * 2 * (2 * 8) * 4  # tokens, layers, keys and values, heads times width, float32
    assert runner.num_blocks == 100_000 // block_bytes


@pytest.mark.parametrize(("weights", "dtype"), [("bfloat16", "auto"), ("int8", "bfloat16"), ("int4", "float32")])
def test_every_format_of_weights_generates(weights, dtype, load_tiny):
    runner, _ = load_tiny("llama", weights=weights, dtype=dtype)
    assert runner.dtype == weights
    stream = Stream(random_prompt(12, 1), [0, 1])
    step(runner, [stream])
    assert len(stream.answer) == 1


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integer_weights_are_refused_on_a_gpu(weights):
    with pytest.raises(BadRequest, match=f"weights: {weights} is served on a CPU only"):
        choose_format(weights, "auto", torch.device("cuda"))


def test_float32_is_left_to_torch_and_bfloat16_is_packed():
    cpu = torch.device("cpu")
    assert choose_format("float32", "bfloat16", cpu) == ("float32", torch.float32, None)
    assert choose_format("auto", "bfloat16", cpu) == ("bfloat16", torch.bfloat16, 16)
    assert choose_format("int4", "float32", cpu) == ("int4", torch.float32, 4)


@needs_kernels
def test_a_processor_without_bfloat16_reads_weights_in_it_and_computes_in_float32(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset({"avx2"}))
    for weights in ("auto", "bfloat16"):
        assert choose_format(weights, "auto", cpu) == ("bfloat16", torch.float32, 16)
    assert choose_format("auto", "float32", cpu) == ("float32", torch.float32, None)
    native.allow(allowed=False)
    try:
        assert choose_format("auto", "auto", cpu) == ("float32", torch.float32, None)
    finally:
        native.allow(allowed=True)


def test_a_token_outside_the_vocabulary_is_refused(load_tiny):

    runner, _ = load_tiny("llama")
    with pytest.raises(BadRequest, match="outside the vocabulary of 101"):
        runner.run_step([Stream([5, VOCABULARY], [0]).next_slot()])
