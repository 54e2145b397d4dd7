"""The compiled form of a decoder gives what transformers gives; a model of any other shape has none and runs as before."""

from __future__ import annotations

import logging
from itertools import zip_longest

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from sie import native
from sie.native import Feature
from sie.values.errors import NonFinite
from sie.values.generate import Sampling
from sie.workers.generation.decoder_probe import relative_distance
from sie.workers.generation.packed_weights import dequantise
from sie.workers.model_api import Draw, Slot
from tests.generation_models import FAMILIES, Stream, answer_alone_and_mixed, generate, load, random_prompt, save, step
from tests.kernels import OLDER, in_every_format, limited_to, needs_bf16_kernels, needs_kernels

COMPILED = (
    "llama", "mistral", "qwen2", "qwen2-sliding", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite", "olmo2",
    "olmo3", "smollm3",
)  # fmt: skip
OTHERS = [
    name for name in FAMILIES
    if name not in (*COMPILED, "bamba", "bloom", "codegen", "falcon", "gpt_neo", "gptj", "lfm2", "mamba", "mpt")
]  # fmt: skip
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((5, 29, 18))]
NUM_TOKENS = 10
PROCESSORS = (native.features(), Feature.AVX2)
PARTS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 1, 13, 7, 1]
"""Lengths of the first parts of a prompt of 150 tokens."""
pytestmark = needs_kernels


def rounded(directory) -> torch.nn.Module:
    """Return the library's own model in float32, its linear layers rounded to eight bits."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(dequantise(layer.weight.detach(), 8), requires_grad=False)
    return model


@pytest.mark.parametrize("name", COMPILED)
def test_tokens_alone_and_mixed_equal_the_library(name, load_tiny):
    runner, directory = load_tiny(name, weights="int8")
    assert runner.decoder is not None
    oracles = [generate(rounded(directory), prompt, NUM_TOKENS) for prompt in PROMPTS]
    answers = answer_alone_and_mixed(runner, PROMPTS, NUM_TOKENS)
    for oracle, (alone, mixed) in zip(oracles, answers, strict=True):
        assert min(oracle.gaps[:3]) > 1e-4, "nothing would be compared"
        assert oracle.agrees(alone)
        assert oracle.agrees(mixed)


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_have_no_compiled_form(name, load_tiny):
    runner, _ = load_tiny(name, weights="int8")
    assert runner.decoder is None


def test_float32_weights_are_left_to_torch(load_tiny):
    assert load_tiny("llama")[0].decoder is None


def logits_both_ways(runner, steps: list[list[Slot]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run steps compiled and layer by layer, each from clear blocks; return each step's logits."""
    decoder, found = runner.decoder, []
    assert decoder is not None
    for runner.decoder in (decoder, None):
        for layer in runner.cache.layers:
            layer.keys.zero_()
            layer.values.zero_()
        found.append([runner.run_logits(slots) for slots in steps])
    runner.decoder = decoder
    return list(zip(*found, strict=True))


def steps_of(prompt, cuts, blocks) -> list[list[Slot]]:
    stream = Stream(prompt, blocks)
    draws = stream.next_slot().draws
    return [[Slot(prompt[a:b], a, stream.blocks, draws)] for a, b in zip((0, *cuts), (*cuts, len(prompt)), strict=True)]


@needs_bf16_kernels
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi3"])
def test_parts_of_every_size_give_what_the_layers_give(name, weights, num_threads, load_tiny):
    runner, _ = load_tiny(name, weights=weights, dtype="bfloat16")
    steps = steps_of(random_prompt(150, 4), np.cumsum(PARTS), np.random.default_rng(8).permutation(20).tolist())
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        far = [relative_distance(a[0], b[0]) for a, b in logits_both_ways(runner, steps)]
    finally:
        torch.set_num_threads(before)
    assert np.median(far) < 0.05
    assert max(far) < 0.25


@needs_bf16_kernels
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tiles_give_what_the_layers_give_without_them(name, weights, tmp_path, request):
    """Prompts of more and fewer rows than a tile has, alone and beside streams, with windows, over blocks in any order."""
    runner = load(save(tmp_path / name, name), weights=weights, dtype="bfloat16", max_sequences=100)
    blocks = np.random.default_rng(8).permutation(60).tolist()
    parts = steps_of(random_prompt(150, 4), np.cumsum(PARTS), blocks[:20])
    beside = steps_of(random_prompt(150, 5), np.cumsum([33, 32, 31, 1, 1]), blocks[20:40])
    steps = [[*one, *other] for one, other in zip_longest(parts, beside, fillvalue=[])]
    steps.append([first_slot(random_prompt(1 + i % 3, i), [40 + i % 20]) for i in range(20)])
    with limited_to(OLDER["AVX-512"]):
        expected = [by_layer for _, by_layer in logits_both_ways(runner, steps)]
    request.getfixturevalue("tiles")
    found = [compiled for compiled, _ in logits_both_ways(runner, steps)]
    far = [
        relative_distance(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)
    ]
    assert np.median(far) < 0.05
    assert max(far) < 0.25


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo3", "phi3"])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_in_float32_both_ways_are_one_number(name, weights, processor, load_tiny):
    runner, _ = load_tiny(name, weights=weights)
    prompt = random_prompt(150, 4)
    steps = steps_of(prompt, [1, 3, 20, 60, 61, 62, 79, 80, 149], np.random.default_rng(8).permutation(20).tolist())
    with limited_to(processor):
        found = logits_both_ways(runner, steps)
    for compiled, by_layer in found:
        torch.testing.assert_close(compiled, by_layer, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("num_beside", [0, 1, 20, 70])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_parts_that_nothing_is_drawn_from_leave_their_keys_and_values(name, weights, num_beside, load_tiny):
    runner, _ = load_tiny(name, weights=weights, max_sequences=100)
    prompt = random_prompt(90, 5)
    draws = Stream(prompt, range(12)).next_slot().draws
    steps = []
    for first, last in ((0, 40), (40, 89), (89, 90)):
        beside = [Slot(prompt[i % 7 : i % 7 + 1], 0, [20 + i], draws) for i in range(num_beside)]
        part = Slot(prompt[first:last], first, range(12), draws if last == 90 else ())
        steps.append([*beside[:1], part, *beside[1:]])
    for compiled, by_layer in logits_both_ways(runner, steps):
        assert compiled.shape == by_layer.shape
        torch.testing.assert_close(compiled, by_layer, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [2, 5, 8, 9, 16, 17, 70])
def test_sequences_that_decode_together_give_what_each_gives_alone(count, load_tiny):
    runner, _ = load_tiny("gemma3", weights="int8", max_sequences=100)
    prompts = [random_prompt(3 + i % 23, i) for i in range(count)]
    streams = [Stream(prompt, range(4 * i, 4 * i + 4)) for i, prompt in enumerate(prompts)]
    for _ in range(3):
        step(runner, streams)
    for prompt, stream in list(zip(prompts, streams, strict=True))[:: max(1, count // 8)]:
        alone = Stream(prompt, range(400, 404))
        for _ in range(3):
            step(runner, [alone])
        assert alone.answer == stream.answer


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        pytest.param("bfloat16", "bfloat16", marks=needs_bf16_kernels),
        pytest.param("int8", "bfloat16", marks=needs_bf16_kernels),
        ("int4", "float32"),
    ],
)
def test_the_likeliest_tokens_are_those_of_the_logits(weights, dtype, num_threads, load_tiny):
    runner, _ = load_tiny("gemma3", weights=weights, dtype=dtype, max_sequences=100)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for count in (1, 3, 15, 40, 97):
            slots = [first_slot(random_prompt(1 + i % 3, i), [i]) for i in range(count)]
            logits = runner.run_logits(slots).clone()
            assert likeliest(runner, slots) == logits.argmax(1).tolist()
            # Whatever is likeliest may be forbidden, also on both sides of a tile's edge.
            forbidden = [tuple(row.topk(1 + i % 4).indices.tolist()) for i, row in enumerate(logits)]
            for row, ids in zip(logits, forbidden, strict=True):
                row[list(ids)] = -torch.inf
            bound = [
                slot._replace(draws=(slot.draws[0]._replace(forbidden=ids),))
                for slot, ids in zip(slots, forbidden, strict=True)
            ]
            assert likeliest(runner, bound) == logits.argmax(1).tolist()
    finally:
        torch.set_num_threads(before)


def first_slot(prompt, blocks) -> Slot:
    return Slot(prompt, 0, blocks, (Draw(Sampling(temperature=0.0), 0, len(prompt)),))


def likeliest(runner, slots) -> list[int]:
    return [chosen.token_id for (chosen,) in runner.run_step(slots)]


def test_parts_of_prompts_beside_streams_choose_nothing(load_tiny):
    runner, _ = load_tiny("gemma3", weights="int8", dtype="bfloat16", max_sequences=100)
    prompt = random_prompt(40, 5)
    slots = [first_slot(prompt[:3], [0]), Slot(prompt, 0, range(1, 6), ()), first_slot(prompt[:9], [6, 7])]
    alone = [runner.run_step([slot])[0] for slot in (slots[0], slots[2])]
    assert runner.run_step(slots) == [alone[0], (), alone[1]]


def test_blocks_are_copied_before_a_step_of_likeliest_tokens(load_tiny):
    runner, _ = load_tiny("gemma3", weights="int8", dtype="bfloat16", max_sequences=100)
    draws = first_slot(PROMPTS[0], [0]).draws
    runner.run_step([Slot(PROMPTS[0][:-1], 0, [0], ())])
    own = runner.run_step([Slot(PROMPTS[0][-1:], len(PROMPTS[0]) - 1, [0], draws)])
    assert runner.run_step([Slot(PROMPTS[0][-1:], len(PROMPTS[0]) - 1, [9], draws)], [(0, 9)]) == own


def test_logits_that_are_not_numbers_choose_nothing(tmp_path):
    runner = load(save(tmp_path / "llama", "llama"), weights="int8")
    assert runner.decoder is not None
    runner.model.get_input_embeddings().weight.data[:] = torch.nan
    assert isinstance(runner.run_step([first_slot(PROMPTS[0], [0])])[0], NonFinite)


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_size": 40, "intermediate_size": 80, "head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 3},
        {"hidden_size": 72, "intermediate_size": 16, "head_dim": 34, "num_attention_heads": 7, "num_key_value_heads": 1},
        {"hidden_size": 32, "intermediate_size": 112, "head_dim": 72, "num_attention_heads": 2, "num_key_value_heads": 2},
    ],
)  # fmt: skip
@in_every_format
def test_widths_that_fill_no_vector_are_computed_whole(shape, dtype, tmp_path, monkeypatch):
    config, values = FAMILIES["qwen3"]
    monkeypatch.setitem(FAMILIES, "odd", (config, {**values, **shape, "attention_bias": True}))
    runner = load(save(tmp_path / "odd", "odd"), dtype=str(dtype).removeprefix("torch."), weights="int8")
    assert runner.decoder is not None
    steps = steps_of(random_prompt(70, 2), [1, 2, 31, 64], range(9))
    far = [relative_distance(a[0], b[0]) for a, b in logits_both_ways(runner, steps)]
    assert max(far) < (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_long_sequences_are_cut_into_segments_and_outgrow_the_tables(processor, tmp_path, monkeypatch):
    config, values = FAMILIES["llama"]
    monkeypatch.setitem(FAMILIES, "long", (config, {**values, "max_position_embeddings": 2048}))
    runner = load(save(tmp_path / "long", "long"), weights="int8", context_length=2048)
    prompt = random_prompt(1300, 3)
    steps = steps_of(prompt, [600, 601, 1150, 1299], range(170))
    with limited_to(processor):
        found = logits_both_ways(runner, steps)
    for compiled, by_layer in found:
        torch.testing.assert_close(compiled, by_layer, atol=2e-4, rtol=1e-4)


def test_what_lies_in_blocks_behind_the_last_token_is_not_read(load_tiny):
    runner, _ = load_tiny("gemma3", weights="int8")
    assert runner.decoder is not None
    clean = [Stream(PROMPTS[1], range(5)), Stream(PROMPTS[0], [6])]
    step(runner, clean)
    for layer in runner.cache.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    streams = [Stream(PROMPTS[1], range(5)), Stream(PROMPTS[0], [6])]
    step(runner, streams)
    assert [stream.answer for stream in streams] == [stream.answer for stream in clean]
    for layer in runner.cache.layers:
        layer.keys.zero_()
        layer.values.zero_()


def test_a_model_that_only_looks_alike_is_found_out(tmp_path, monkeypatch, caplog):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    own = LlamaDecoderLayer.forward
    monkeypatch.setattr(
        LlamaDecoderLayer, "forward", lambda self, states, **kwargs: own(self, states, **kwargs) - 0.7 * states
    )
    with caplog.at_level(logging.WARNING):
        runner = load(save(tmp_path / "alike", "llama"), weights="int8")
    assert runner.decoder is None
    assert "alike: steps run without the compiled decoder" in caplog.text
    step(runner, [Stream(PROMPTS[0], [0])])


def test_rotations_that_depend_on_the_length_are_left_to_the_library(tmp_path, monkeypatch):
    config, values = FAMILIES["llama"]
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    monkeypatch.setitem(FAMILIES, "dynamic", (config, {**values, "rope_parameters": rope}))
    assert load(save(tmp_path / "dynamic", "dynamic"), weights="int8").decoder is None


def test_without_kernels_a_model_runs_as_before(tmp_path):
    directory = save(tmp_path / "llama", "llama")
    native.allow(allowed=False)
    try:
        runner = load(directory, weights="int8")
        assert runner.decoder is None
        oracle = generate(rounded(directory), PROMPTS[0], 3)
        stream = Stream(PROMPTS[0], [0])
        for _ in range(3):
            step(runner, [stream])
        assert oracle.agrees(stream.answer)
    finally:
        native.allow(allowed=True)
