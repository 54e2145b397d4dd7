"""Gemma 3 270M, real weights from a GGUF file: its tokens are the library's own, packed weights stay near them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from sie.config.generation_settings import Generation
from sie.values.card import ModelCard
from sie.values.generate import GenerateRule
from sie.workers.loading.loader import load_generator
from tests.generation_models import Oracle, Stream, step
from tests.gguf_models import gemma_file
from tests.unit.workers.generation_rig import EngineRig

CAPITAL = [2, 818, 5279, 529, 7001, 563]  # "The capital of France is"
PROMPTS = (
    CAPITAL,
    [2, 2063, 10779, 78113, 236769, 236749, 1473, 107, 140],  # "def fibonacci(n):\n    "
    [2, 14946, 3324, 496, 990, 236764, 528, 496, 9744, 684, 506, 5442, 236764, 993, 11742],  # "Once upon a time, ..."
)
FRANCE = 7001


@pytest.fixture(scope="module")
def runner():
    path = gemma_file()
    rule = GenerateRule(context_length=32768, eos_token_ids=(1,))
    card = ModelCard(
        id="gemma",
        kind="generator",
        directory=str(path.parent),
        outputs=("generate",),
        generate=rule,
        gguf_file=str(path),
    )
    return load_generator(card, "cpu", "float32", Generation(kv_cache_bytes=1 << 26), lambda *_: None)


def judge(model, stream: Stream) -> Oracle:
    """Return the library's best token behind the prompt and behind each token of an answer, in one forward pass.

    An answer is the library's own greedy one if each of its tokens is the best behind those before it.
    """
    with torch.no_grad():
        logits = model(torch.tensor([stream.tokens])).logits[0, stream.num_prompt - 1 : -1]
    best = logits.topk(2)
    return Oracle(best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist())


def test_greedy_tokens_are_the_librarys_own_in_a_mixed_batch(runner):
    streams = [Stream(prompt, range(3 * i, 3 * i + 3)) for i, prompt in enumerate(PROMPTS)]
    step(runner, streams[:1], most=3)
    while min(len(stream.answer) for stream in streams) < 8:
        step(runner, streams, most=3)
    runner.model.set_attn_implementation("sdpa")
    try:
        oracles = [judge(runner.model, stream) for stream in streams]
    finally:
        runner.model.set_attn_implementation("sie_paged")
    for oracle, stream in zip(oracles, streams, strict=True):
        assert len(stream.answer) >= 8
        assert oracle.agrees(stream.answer)
    assert FRANCE in streams[0].answer


def test_prompts_are_judged_as_by_the_library_in_a_mixed_batch(runner):
    rig = EngineRig(runner=runner, max_prefill_tokens=12, prompt_logits_bytes=4 * 262144 * 7)
    asked = [rig.submit(prompt, max_tokens=1, prompt_logprobs=1, num_choices=2) for prompt in PROMPTS]
    rig.submit(CAPITAL, max_tokens=6)
    rig.run()
    runner.model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            expected = [runner.model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1) for prompt in PROMPTS]
    finally:
        runner.model.set_attn_implementation("sie_paged")
    for answer, prompt, logprobs in zip(asked, PROMPTS, expected, strict=True):
        own = logprobs[range(len(prompt) - 1), prompt[1:]].numpy()
        best, ids = logprobs.max(-1)
        assert np.abs(answer.scores.own - own).max() < 1e-3
        assert np.abs(answer.scores.top[:, 0] - best.numpy()).max() < 1e-3
        assert answer.scores.top_ids[:, 0].tolist() == ids.tolist()


def test_the_vocabulary_is_passed_over_and_everything_else_is_read(runner):
    config = runner.model.config
    assert (config.vocab_size, config.num_hidden_layers, config.sliding_window) == (262144, 18, 512)
    assert isinstance(runner.model, transformers.Gemma3ForCausalLM)
    assert runner.num_blocks == (1 << 26) // (32 * 18 * 2 * 256 * 4)
