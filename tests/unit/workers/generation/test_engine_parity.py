"""The engine with a real runner: in shared steps, after preemption or from the cache, the tokens are the library's own."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers

from sie.values.generate import Sampling
from tests.generation_models import BY_LENGTH, generate, load, random_prompt
from tests.unit.workers.generation_rig import EngineRig

NUM_TOKENS = 40


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", *BY_LENGTH])
def test_tokens_are_the_library_s_under_preemption_and_sharing(name, load_tiny) -> None:
    _, directory = load_tiny(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    runner = load(directory, kv_block_tokens=8)
    runner.num_blocks = 24
    shared = random_prompt(30, 9)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((5, 29, 18, 41))]
    prompts += [np.concatenate((shared, random_prompt(length, length))) for length in (1, 7, 12)]
    rig = EngineRig(runner=runner, max_prefill_tokens=13)
    answers = []
    for prompt in prompts:
        answers.append(rig.submit(prompt.tolist(), max_tokens=NUM_TOKENS, num_choices=2, ignore_eos=True))
        rig.step(3)
    rig.run()
    assert rig.engine.planner.num_preempted
    assert rig.engine.planner.num_hits
    for prompt, answer in zip(prompts, answers, strict=True):
        fresh = copy.deepcopy(model)  # a rotary module remembers the longest sequence
        oracle = generate(fresh, prompt, NUM_TOKENS, without=(2,))  # the end is ignored: it is never drawn
        for tokens in answer.tokens:
            assert len(tokens) == NUM_TOKENS
            assert oracle.agrees(tokens)
    rig.assert_all_given_back()


@pytest.mark.parametrize(
    "values", [{"temperature": 0.8}, {"top_p": 0.8, "frequency_penalty": 0.5}, {"top_k": 9, "min_p": 0.05}]
)
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch_that_changes(load_tiny, values) -> None:
    _, directory = load_tiny("llama")
    runner = load(directory, kv_block_tokens=8)
    sampling = Sampling(seed=5, **values)
    prompt = random_prompt(21, 4).tolist()
    task = {"max_tokens": NUM_TOKENS, "num_choices": 2, "ignore_eos": True}
    rig = EngineRig(runner=runner, max_prefill_tokens=64)
    alone = rig.submit(prompt, sampling=sampling, **task)
    rig.run()
    runner.num_blocks = 24
    crowd = EngineRig(runner=runner, max_prefill_tokens=13)
    for length in (40, 9, 33):
        crowd.submit(random_prompt(length, length).tolist(), sampling=Sampling(seed=length, top_p=0.9), **task)
        crowd.step(2)
    amid = crowd.submit(prompt, sampling=sampling, **task)
    crowd.run()
    assert crowd.engine.planner.num_preempted
    assert amid.tokens == alone.tokens
    assert alone.tokens[0] != alone.tokens[1]
