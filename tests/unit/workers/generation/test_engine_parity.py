"""The engine with a real runner: whatever shares a step, is preempted or was cached, the tokens are the library's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from tests.generation_models import generate, load, random_prompt
from tests.unit.workers.generation_rig import EngineRig

NUM_TOKENS = 40


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3"])
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
        oracle = generate(model, prompt, NUM_TOKENS)
        for tokens in answer.tokens:
            assert len(tokens) == NUM_TOKENS
            assert oracle.agrees(tokens)
    rig.assert_all_given_back()
