"""Captures of decode steps: which models can be captured, and what becomes of those that cannot."""

from __future__ import annotations

import sys
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import sie.workers.generation
from sie.values.card import ModelCard
from sie.values.generate import GenerateRule, Sampling
from sie.workers.device import memory
from sie.workers.device.capture import Capturer, CaptureRefusedError, refusing_waits
from sie.workers.device.fallbacks import collecting
from sie.workers.generation import graphs, paging
from sie.workers.generation.graphs import try_capture
from sie.workers.generation.paged_cache import PagedCache
from sie.workers.generation.runner import TextGenerator
from sie.workers.model_api import Draw, Slot
from sie.workers.packed.rotation import find_rotations
from tests import paged_reference
from tests.generation_models import BY_LENGTH, FAMILIES, random_prompt
from tests.unit.workers.device.fake_cuda import FakeCuda

META = torch.device("meta")
"""Stands for a GPU: it computes nothing, but a step that waits for it or mixes it with the host fails."""


@pytest.fixture
def cuda(monkeypatch):
    kernels = SimpleNamespace(
        Tables=paged_reference.Tables, write_rows=lambda *_: None, attend_blocks=lambda *_, **__: None
    )
    monkeypatch.setitem(sys.modules, "sie.workers.generation.kernels", kernels)
    monkeypatch.setattr(sie.workers.generation, "kernels", kernels, raising=False)
    monkeypatch.setattr(memory, "_allocator", memory._Allocator())
    monkeypatch.setattr(Capturer, "forbidden", "")
    monkeypatch.setattr(graphs, "_LARGEST", 4)
    return FakeCuda(monkeypatch)


def on_gpu(name):
    """Return a tiny model on the stand-in for a GPU, and its blocks."""
    config_class, values = {**FAMILIES, **BY_LENGTH}[name]
    config = getattr(transformers, config_class)(**values, dtype="bfloat16")
    with META:
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    find_rotations(model)  # which waits for nothing; transformers 5.17's own choice of factors does
    with torch.inference_mode():
        recorder = paging._record("m", model, random_prompt(9, 0), META)
        cache = PagedCache(recorder.layers, 16, 8, META)
    card = ModelCard(id="m", kind="generator", outputs=("generate",), generate=GenerateRule(context_length=256))
    return TextGenerator(card, model, cache, "bfloat16"), cache


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt2", "phi3-longrope", "cohere2", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
)
def test_the_steps_of_a_family_wait_for_nothing_and_are_captured(name, cuda):
    runner, cache = on_gpu(name)
    with collecting("m") as fallbacks:
        captured = try_capture(cache, runner._run_model, 3, 8)
    assert fallbacks.found == ()
    assert captured is not None
    assert captured.sizes == [4, 2, 1]
    assert [len(one.answers.logits) for one in captured._captured.values()] == [3, 2, 1]
    assert cuda.num_captured == 3


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_whose_products_wait_for_the_device_are_not_captured(name, cuda):
    cuda.capability = (8, 0)
    runner, cache = on_gpu(name)
    with collecting("m") as fallbacks:
        assert try_capture(cache, runner._run_model, 4, 8) is None
    (fallback,) = fallbacks.found
    assert (fallback.name, cuda.num_captured) == ("no_graphs", 0)
    assert "aten._grouped_mm.default waits" in fallback.reason


def test_a_model_that_waits_for_the_device_is_not_captured_and_says_why(cuda):
    runner, cache = on_gpu("llama")
    layer = runner.model.model.layers[1].mlp
    forward, layer.forward = layer.forward, lambda states: forward(states[states > 0][:32].view(1, 1, 32))
    calls = []

    def run(*inputs):
        calls.append(inputs)
        return torch.zeros(4, 101, device=META) if len(calls) == 1 else runner._run_model(*inputs)

    with collecting("m") as fallbacks:
        assert try_capture(cache, run, 4, 8) is None
    (fallback,) = fallbacks.found
    assert (fallback.name, fallback.reason) == (
        "no_graphs", "CaptureRefusedError: aten.index.Tensor waits for the device",
    )  # fmt: skip
    assert (cuda.num_captured, cuda.underway, cache.step) == (0, [], None)


def test_a_capture_that_fails_leaves_a_model_without_graphs_and_memory_to_free(cuda):
    runner, cache = on_gpu("llama")

    def run(*inputs):
        if cuda.num_captured == 1:
            cuda.invalidate()
        return runner._run_model(*inputs)

    with collecting("m") as fallbacks:
        assert try_capture(cache, run, 4, 8) is None
    assert [fallback.name for fallback in fallbacks.found] == ["no_graphs"]
    assert (cuda.num_captured, cuda.underway, cuda.stream, cache.step) == (1, [], "default", None)
    memory.free_cached()
    assert not memory.is_worn()


def test_steps_are_captured_for_as_many_tokens_as_the_blocks_hold(cuda, monkeypatch):
    monkeypatch.setattr(graphs, "_LARGEST", 256)
    runner, cache = on_gpu("llama")
    captured = try_capture(cache, runner._run_model, 1, 8)
    assert captured is not None
    assert captured.sizes[0] == 16 * 8 == cache.num_blocks * cache.block_tokens


class Copies(TorchDispatchMode):
    """Records how many numbers each copy has."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def random_slots(random, size):
    """Return slots of at most so many tokens: sequences that decode, and chunks of prompts."""
    slots = []
    while (left := size - sum(len(slot.token_ids) for slot in slots)) and random.random() < 0.9:
        length, start = random.choice([1, 1, min(left, 3)]), random.randrange(20)
        blocks = random.sample(range(50), 6)
        slots.append(Slot(np.arange(length, dtype=np.int32), start, blocks, rotary_length=random.choice([0, 9])))
    return slots or [Slot(np.zeros(1, np.int32), 0, [3] * 6)]


def next_slots(random, slots, size):
    """Return the slots of a later step: most go on where they were, some end, get another block, or are new."""
    kept = [slot._replace(token_ids=slot.token_ids[:1], start=slot.start + random.randrange(2)) for slot in slots]
    for slot in kept:
        if random.random() < 0.2:
            slot.blocks[random.randrange(6)] = random.randrange(50)
    if random.random() < 0.5:
        return [slot for slot in kept if slot.start < 24 and random.random() < 0.9] or random_slots(random, size)
    return random_slots(random, size)


@pytest.mark.parametrize("seed", range(20))
def test_the_inputs_of_a_recorded_step_are_right_whatever_the_steps_before_had(seed):
    random = Random(seed)
    inputs = graphs.StepInputs(8, 8, 6, torch.device("cpu"))
    slots = random_slots(random, 8)
    for _ in range(60):
        inputs.fill(slots, [0], 4, 50)
        tokens = [(slot, slot.start + place) for slot in slots for place in range(len(slot.token_ids))]
        assert inputs.numbers.T.tolist() == [
            [
                position - slot.start,
                position,
                slot.blocks[position // 4] * 4 + position % 4,
                max(position + 1, slot.rotary_length),
            ]
            for slot, position in tokens
        ] + [[0, 0, 200, 1]] * (8 - len(tokens))
        for column, (slot, position) in enumerate(tokens):
            num_seen = position // 4 + 1
            assert inputs.blocks[:num_seen, column].tolist() == slot.blocks[:num_seen]
        assert inputs.blocks[0, len(tokens) :].tolist() == [50] * (8 - len(tokens))
        slots = next_slots(random, slots, 8)


def test_the_table_of_blocks_is_copied_only_when_a_sequence_sees_another_block():
    inputs = graphs.StepInputs(4, 4, 6, torch.device("cpu"))
    slots = [Slot(np.zeros(1, np.int32), start, [9, start, 2]) for start in (5, 6)]

    def copied():
        with Copies() as copies:
            inputs.fill(slots, [0, 1], 4, 50)
        numbers, *rest = copies.sizes
        assert numbers == 6 * 4
        return rest

    assert copied() == [2 * 4], "two rows of the table"
    slots = [slot._replace(start=slot.start + 1) for slot in slots]
    assert copied() == []
    slots = [slot._replace(start=slot.start + 1) for slot in slots]
    assert copied() == [3 * 4], "the second sequence has a third block"
    slots = slots[1:]
    assert copied() == [3 * 4], "its column is another"


def test_a_table_whose_copy_failed_is_written_again():
    inputs = graphs.StepInputs(1, 1, 2, torch.device("cpu"))
    slots = [Slot(np.zeros(1, np.int32), 0, [7])]
    table, inputs.blocks = inputs.blocks, None
    with pytest.raises(TypeError):
        inputs.fill(slots, [0], 4, 50)
    inputs.blocks = table
    inputs.fill(slots, [0], 4, 50)
    assert table[0].tolist() == [7]


def move_to_meta(monkeypatch):
    """Let copies to the stand-in for a GPU come from page-locked memory, as those to a GPU do."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sie.workers") and hasattr(module, "move"):
            monkeypatch.setattr(module, "move", lambda tensor, device: torch.empty_like(tensor, device=device))


def slots_of_all_kinds():
    """Return the slots of a step that was launched, and of the next: prompts, known tokens, and tokens of the first."""
    kinds = [
        {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 9}, {"min_p": 0.1, "seed": 3}, {"logit_bias": ((5, 2.0),)}
    ]  # fmt: skip
    draws = [
        Draw(Sampling(**kind), 0, 9, None, (2,), place)
        for kind, place in zip(kinds, (None, 0, 2, None, 1), strict=True)
    ]
    ids = np.arange(3, 12, dtype=np.int32)
    first = [Slot(ids, 0, (2 * number, 2 * number + 1), (draw,)) for number, draw in enumerate(draws)]
    behind = [
        slot._replace(token_ids=ids[:1], start=9, draws=slot.draws if number else (), drawn=number or None)
        for number, slot in enumerate(first)
    ]
    return first, [*behind, Slot(ids, 0, (10, 11), rotary_length=40), Slot(ids[:3], 8, (12, 13))]


@pytest.mark.parametrize(("name", "is_flash"), [("llama", True), ("phi3-longrope", False), ("gpt_oss", False)])
def test_launching_a_step_waits_for_nothing(name, is_flash, cuda, monkeypatch):
    runner, _ = on_gpu(name)
    runner.reads_in_place = True
    move_to_meta(monkeypatch)
    varlen = "sie.workers.generation.varlen"
    monkeypatch.setattr(f"{varlen}.can_attend_flash", lambda *_: is_flash)
    monkeypatch.setattr(f"{varlen}.attend_flash", lambda query, *_, **__: query.transpose(0, 1))
    first, behind = slots_of_all_kinds()
    with refusing_waits():
        runner.launch_step(first)
        runner.launch_step(behind, [(1, 14)])
        with pytest.raises(CaptureRefusedError):
            runner._drawn.cpu()


def test_a_launched_part_of_a_prompt_is_waited_for(cuda, monkeypatch):
    """It has no token to read. Without a wait, all parts of a long prompt would be under way at once."""
    runner, _ = on_gpu("llama")
    move_to_meta(monkeypatch)
    waits = []
    monkeypatch.setattr("sie.workers.generation.runner.wait_later", lambda device: lambda: waits.append(device))
    read = runner.launch_step([Slot(np.arange(3, 12, dtype=np.int32), 0, (0, 1))])
    assert waits == []
    assert (read(), waits) == ([()], [META])
