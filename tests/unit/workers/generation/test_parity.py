"""Greedy tokens are those of the library's own `generate`, in float32, for every family that is served."""

from __future__ import annotations

import pytest
import torch
import transformers

from sie.values.generate import Sampling
from sie.workers.model_api import Draw
from tests.generation_models import (
    FAMILIES,
    Stream,
    answer_alone_and_mixed,
    generate,
    random_prompt,
    scattered_blocks,
    step,
)

REFUSED = ("bamba", "bloom", "codegen", "falcon", "gpt_neo", "gptj", "lfm2", "mamba", "mpt")
SERVED = [name for name in FAMILIES if name not in REFUSED]
NUM_TOKENS = 12
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((5, 29, 18))]


@pytest.fixture(scope="module")
def oracles(load_tiny):
    found = {}

    def get(name: str):
        if name not in found:
            _, directory = load_tiny(name)
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            found[name] = [generate(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
            assert all(min(oracle.gaps[:3]) > 1e-4 for oracle in found[name]), "nothing would be compared"
        return found[name]

    return get


@pytest.mark.parametrize("name", SERVED)
def test_alone_and_mixed_equal_the_library(name, load_tiny, oracles):
    runner, _ = load_tiny(name)
    answers = answer_alone_and_mixed(runner, PROMPTS, NUM_TOKENS)
    for oracle, (alone, mixed) in zip(oracles(name), answers, strict=True):
        assert oracle.agrees(alone)
        assert oracle.agrees(mixed)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma2", "gpt2"])
def test_shared_prefix_and_forked_choices_equal_the_library(name, load_tiny, oracles):
    runner, _ = load_tiny(name)
    oracle = oracles(name)[1]
    first = Stream(PROMPTS[1], range(10, 18))
    step(runner, [first])
    # Another request whose prompt begins alike reads the full blocks of the first, and computes the rest.
    second = Stream(PROMPTS[1], [10, 11, 30, 31, 32, 33], num_read=16)
    step(runner, [second])
    # Two choices of one prompt: the part of a block that they share is copied before either goes on.
    prompt = Stream(PROMPTS[1], range(40, 46))
    slot = prompt.next_slot()
    greedy = slot.draws[0]
    chosen = runner.run_step([slot._replace(draws=(greedy, greedy._replace(choice=1)))])[0]
    assert chosen[0] == chosen[1]
    choices = [Stream(PROMPTS[1], range(40, 46), 29), Stream(PROMPTS[1], [40, 41, 42, 53, 54, 55], 29)]
    for choice in choices:
        choice.tokens.append(chosen[0].token_id)
    choices[1].tokens[-1] = (chosen[0].token_id + 1) % 90 + 3  # the second goes its own way
    slots = [choice.next_slot() for choice in choices]
    for choice, (token,) in zip(choices, runner.run_step(slots, copies=[(43, 53)]), strict=True):
        choice.num_read += 1
        choice.tokens.append(token.token_id)
    running = [first, second, *choices]
    while len(choices[0].answer) < NUM_TOKENS:
        step(runner, running)
    assert oracle.agrees(first.answer)
    assert oracle.agrees(second.answer)
    assert oracle.agrees(choices[0].answer)


def test_decoding_sequences_of_unlike_length_equal_the_library(load_tiny, oracles):
    """One long sequence among short ones: they read their blocks in several groups."""
    runner, _ = load_tiny("gemma3")
    long = Stream(random_prompt(150, 9), range(100, 130))
    while long.num_read < 150:
        step(runner, [long], most=64)
    short = [Stream(prompt, scattered_blocks(i)) for i, prompt in enumerate(PROMPTS)]
    while min(len(stream.answer) for stream in short) < NUM_TOKENS:
        step(runner, [*short, long])
    for oracle, stream in zip(oracles("gemma3"), short, strict=True):
        assert oracle.agrees(stream.answer)
    again = Stream(random_prompt(150, 9), range(8, 32))
    while len(again.answer) < NUM_TOKENS:
        step(runner, [again])
    assert again.answer == long.answer[:NUM_TOKENS]


def test_a_block_used_before_leaves_nothing_behind(load_tiny):
    """Values that are not finite, left in a block, do not reach the sequence that gets it next."""
    runner, _ = load_tiny("llama")
    clean = Stream(PROMPTS[0], [0])
    step(runner, [clean])
    for layer in runner.cache.layers:
        layer.keys[:9] = torch.nan
        layer.values[:9] = torch.nan
    streams = [Stream(PROMPTS[0], [0, 1]), Stream(PROMPTS[2], [2, 3, 4, 5])]
    for _ in range(4):
        step(runner, streams, most=9)
    assert streams[0].answer[0] == clean.answer[0]
    for layer in runner.cache.layers:
        layer.keys[:9] = 0
        layer.values[:9] = 0


def test_draws_of_one_slot_are_returned_together(load_tiny):
    runner, _ = load_tiny("llama")
    slot = Stream(PROMPTS[0], [0, 1]).next_slot()
    draws = tuple(Draw(Sampling(seed=3), choice, 5) for choice in range(8))
    chosen = runner.run_step([slot._replace(draws=draws), Stream(PROMPTS[2], [2, 3, 4]).next_slot(most=9)])
    assert [len(of_slot) for of_slot in chosen] == [8, 0]
    assert len({choice.token_id for choice in chosen[0]}) > 1
