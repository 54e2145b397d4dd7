"""Log probabilities of a prompt's own tokens equal the library's log_softmax, for any chunks and any other requests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sie.values.errors import BadRequest, NonFinite
from sie.values.generate import GenerateTask, Sampling
from sie.workers.generation.engines import read_task
from sie.workers.generation.given_tokens import score
from sie.workers.generation.prompt_scores import PromptScores
from sie.workers.model_api import Scored, Slot
from tests.generation_models import random_prompt
from tests.unit.workers.generation_rig import FAR_NS, EngineRig, Frontend, make_card

CLOSE = 2e-4
"""In float32, of sums over a few hundred numbers in another order."""
FORMS = (("llama", "auto"), ("gemma3", "auto"), ("gpt2", "auto"), ("llama", "int8"), ("gemma3", "int8"))
"""Families and their weights; of eight bits, a decoder is one compiled call where the machine has it."""


def expected(runner, prompt, num_top):
    """Return what the library says of a prompt alone: own (t - 1,), the likeliest ids and theirs (t - 1, k)."""
    with torch.no_grad():
        runner.model.set_attn_implementation("sdpa")
        try:
            logits = runner.model(torch.tensor([list(map(int, prompt))])).logits[0].float()
        finally:
            runner.model.set_attn_implementation("sie_paged")
    logprobs = logits.log_softmax(-1)[:-1]
    own = logprobs[range(len(prompt) - 1), list(map(int, prompt[1:]))]
    values, ids = logprobs.topk(num_top)
    return own.numpy(), ids.numpy(), values.numpy()


def assert_right(answer, runner, prompt, num_top):
    own, ids, values = expected(runner, prompt, num_top)
    if len(prompt) == 1:
        assert answer.scores is None
        return
    found = answer.scores
    assert found.own.shape == own.shape
    assert np.abs(found.own - own).max(initial=0) < CLOSE
    assert found.top.shape == values.shape
    assert np.abs(found.top - values).max(initial=0) < CLOSE
    apart = np.abs(np.diff(values, axis=1, append=-np.inf)) > 2 * CLOSE
    apart[:, 1:] &= apart[:, :-1]
    assert (found.top_ids == ids)[apart].all()


@pytest.mark.parametrize(("family", "weights"), FORMS)
def test_a_prompt_alone_and_in_parts_beside_others_is_judged_as_by_the_library(load_tiny, family, weights):
    runner, _ = load_tiny(family, weights=weights)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((37, 2, 1, 61, 12))]
    for max_prefill in (256, 7):
        rig = EngineRig(runner=runner, max_prefill_tokens=max_prefill, prompt_logits_bytes=4 * runner.vocab_size * 5)
        running = rig.submit(random_prompt(9, 9), max_tokens=30, ignore_eos=True)
        rig.step(3)
        asked = [
            rig.submit(
                prompt,
                max_tokens=number % 3,
                num_choices=1 + number % 2,
                prompt_logprobs=2,
                logprobs=number % 2 or None,
            )
            for number, prompt in enumerate(prompts)
        ]
        rig.run()
        for number, (answer, prompt) in enumerate(zip(asked, prompts, strict=True)):
            assert_right(answer, runner, prompt, 2)
            assert [len(tokens) for tokens in answer.tokens] == [number % 3] * (1 + number % 2)
            assert answer.finish == ["length"] * (1 + number % 2)
        assert running.finish == ["length"]
        rig.assert_all_given_back()


def test_no_step_has_more_rows_of_logits_than_there_is_memory_for(load_tiny, monkeypatch):
    runner, _ = load_tiny("llama")
    rows = []
    run = runner._run
    monkeypatch.setattr(runner, "_run", lambda *asked: (found := run(*asked), rows.append(len(found.logits)))[0])
    rig = EngineRig(runner=runner, max_prefill_tokens=256, prompt_logits_bytes=4 * runner.vocab_size * 6)
    prompts = [random_prompt(40, seed) for seed in range(3)]
    asked = [rig.submit(prompt, max_tokens=1, prompt_logprobs=0) for prompt in prompts]
    rig.run()
    assert max(rows) <= 6 + len(prompts)
    for answer, prompt in zip(asked, prompts, strict=True):
        assert_right(answer, runner, prompt, 0)


def test_a_beginning_that_is_cached_is_read_again_and_can_be_shared_afterwards(load_tiny):
    runner, _ = load_tiny("llama")
    rig = EngineRig(runner=runner)
    prompt = random_prompt(50, 4)
    rig.submit(prompt, max_tokens=1)
    rig.run()
    judged = rig.submit(prompt, max_tokens=1, prompt_logprobs=1)
    rig.run()
    assert judged.num_cached == 0
    assert_right(judged, runner, prompt, 1)
    plain = rig.submit(prompt, max_tokens=1)
    rig.run()
    assert plain.num_cached == 48
    assert plain.tokens == judged.tokens


def test_a_prompt_whose_blocks_were_taken_is_judged_once(load_tiny):
    """Of four choices for which there are too few blocks some go back to wait, and read the prompt again."""
    runner, _ = load_tiny("llama", kv_cache_bytes=1 << 17)
    rig = EngineRig(runner=runner, is_sharing=False)
    room = runner.num_blocks * runner.block_tokens
    prompt = random_prompt(24, 5)
    first = rig.submit(prompt, max_tokens=room // 4, ignore_eos=True, num_choices=4, prompt_logprobs=1)
    other = rig.submit(random_prompt(30, 6), max_tokens=room // 3, ignore_eos=True, num_choices=2, prompt_logprobs=1)
    rig.run()
    assert rig.engine.planner.num_preempted
    assert_right(first, runner, prompt, 1)
    assert_right(other, runner, random_prompt(30, 6), 1)


def test_a_step_that_fails_and_runs_again_in_parts_changes_nothing():
    rig = EngineRig()
    rig.runner.faults = [(RuntimeError("a kernel"), True), (RuntimeError("a kernel"), False)]
    prompts = [b"what is judged", b"a longer one, so that there are several parts"]
    asked = [rig.submit(prompt, prompt_logprobs=1, max_tokens=0) for prompt in prompts]
    rig.run()
    judged = [answer for answer in asked if answer.error is None]
    assert judged
    for answer in judged:
        prompt = prompts[asked.index(answer)]
        distances = [(token - prompt[0]) % 257 for token in prompt[1:]]
        assert np.allclose(answer.scores.own, [-np.log(2) * (1 + distance) for distance in distances])
    rig.assert_all_given_back()


def test_pieces_are_sent_before_all_else_in_frames_of_bounded_size():
    rig = EngineRig("blocks=4096,max_tokens=20000")
    prompt = [65 + i % 26 for i in range(9000)]
    answer = rig.submit(prompt, prompt_logprobs=3, max_tokens=5, num_choices=2)
    rig.run()
    assert len(answer.scores.own) == 8999
    assert answer.scores.top_ids[:, 0].tolist() == [65] * 8999
    assert rig.frontend.answers.num_frames >= 4
    assert [len(tokens) for tokens in answer.tokens] == [5, 5]


def test_where_there_is_no_room_for_a_frame_the_rest_follows_later():
    rig = EngineRig("blocks=1024,max_tokens=20000")
    rig.frontend.fill()
    answer = rig.submit([65 + i % 26 for i in range(3000)], prompt_logprobs=0, max_tokens=2)
    rig.run()
    assert answer.scores is None
    rig.frontend.empty()
    rig.engine.tend(rig.now_ns)
    assert len(answer.scores.own) == 2999
    assert answer.is_over


def test_a_prompt_as_long_as_the_context_is_read_where_no_answer_is_wanted():
    rig = EngineRig("blocks=8")
    answer = rig.submit([65] * 64, max_tokens=0, prompt_logprobs=0)
    rig.run()
    assert (answer.tokens, answer.finish, len(answer.scores.own)) == ([[]], ["length"], 63)


def test_logits_that_are_not_finite_cost_their_own_request():
    targets = np.array([1, 2], np.int32)
    scored = Scored(0, targets, np.empty(2, np.float32), np.empty((2, 1), np.int32), np.empty((2, 1), np.float32))
    slots = [Slot(np.zeros(2, np.int32), 0, (0,), scored=scored)]
    logits = torch.zeros(2, 4)
    for value in (torch.nan, torch.inf):
        logits[1, 3] = value
        with pytest.raises(NonFinite):
            score(logits, slots)
    logits[1, 3] = -torch.inf
    logits[1, 2] = -torch.inf
    score(logits, slots)
    assert scored.own.tolist() == pytest.approx([-np.log(4), -9999.0])


def test_parts_are_cut_where_there_is_no_room_for_more_rows():
    scores = PromptScores(11, 1)
    assert scores.limit(0, 11, 100) == 11
    assert scores.limit(0, 11, 4) == 4
    assert scores.limit(0, 11, 0) == 0
    assert scores.limit(9, 2, 1) == 2  # the last token is not needed to judge another one
    scores.note_read(6)
    assert [scores.count_rows(0, 6), scores.count_rows(0, 8), scores.count_rows(6, 5)] == [0, 2, 4]
    assert scores.limit(0, 11, 2) == 8  # what is known is only read again


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 257}, {"prompt_logprobs": -1}])
def test_a_task_out_of_bounds_is_refused(fields):
    request = Frontend().submit([1, 2], GenerateTask(0, sampling=Sampling(), **fields), deadline_ns=FAR_NS)
    with pytest.raises(BadRequest, match="prompt_logprobs"):
        read_task(request, make_card())
