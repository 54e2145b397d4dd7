"""Masks of a step's grammars: computed during its forward pass or after it, with the same texts; a failure affects only
its request.
"""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from sie.catalog.gguf_file import read_gguf_card
from sie.config.generation_settings import Generation
from sie.values.errors import BadRequest
from sie.values.generate import Sampling
from sie.workers.generation import runner as runner_module
from sie.workers.generation.grammar import GrammarMatcher
from sie.workers.generation.masks import MaskThread, fill_each, find_hidden
from sie.workers.loading.loader import load_generator
from sie.workers.model_api import Draw
from tests.gguf_models import EOS, write_tiny_llama
from tests.unit.workers.generation_rig import EngineRig

DEADLINE_S = 60
PROMPT = [5, 6, 7]
ARRAY = json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 3})
VOCABULARY = 260


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    card = read_gguf_card("tiny", str(write_tiny_llama(folder / "tiny.gguf")), str(folder))
    return load_generator(card, "cpu", "float32", Generation(kv_block_tokens=8), lambda *_: None)


@pytest.fixture(params=["beside", "behind"])
def place(request, monkeypatch):
    """Have the machine a core to spare for masks, or none."""
    cores = set(range(4096 if request.param == "beside" else 1))
    monkeypatch.setattr(runner_module.os, "sched_getaffinity", lambda _pid: cores)
    return request.param


def answers(runner, *, num_free=2):
    """Return what requests under several grammars, and some without one, are answered in common steps."""
    rig = EngineRig(runner=runner)
    asked = [
        rig.submit(
            PROMPT, max_tokens=30, num_choices=2, grammar_kind=kind, grammar=grammar, sampling=Sampling(seed=seed)
        )
        for seed, (kind, grammar) in enumerate([("regex", "(yes|no){2}"), ("json_schema", ARRAY), ("regex", "[a-f]+x")])
    ]
    asked += [rig.submit(PROMPT, max_tokens=20, sampling=Sampling(seed=seed)) for seed in range(num_free)]
    rig.run()
    rig.assert_all_given_back()
    return [answer.tokens for answer in asked]


def test_every_answer_is_that_of_masks_found_one_by_one(runner, place, monkeypatch):
    found = answers(runner)
    monkeypatch.setattr(GrammarMatcher, "fill_masks", staticmethod(fill_each))
    assert found == answers(runner)
    texts = ["".join(map(chr, tokens)) for tokens in found[0]]
    assert {text.removesuffix(chr(EOS)) for text in texts} <= {"yesyes", "yesno", "noyes", "nono"}


def test_masks_are_found_while_the_forward_pass_runs(runner, monkeypatch):
    monkeypatch.setattr(runner_module.os, "sched_getaffinity", lambda _pid: set(range(4096)))
    is_running, is_found = threading.Event(), threading.Event()
    run, fill = runner._run, GrammarMatcher.fill_masks

    def forward(*asked):
        is_running.set()
        assert is_found.wait(DEADLINE_S)
        return run(*asked)

    def fill_masks(matchers, words):
        assert is_running.wait(DEADLINE_S)
        errors = fill(matchers, words)
        is_found.set()
        return errors

    monkeypatch.setattr(runner, "_run", forward)
    monkeypatch.setattr(GrammarMatcher, "fill_masks", staticmethod(fill_masks))
    rig = EngineRig(runner=runner)
    answer = rig.submit(PROMPT, grammar_kind="regex", grammar="abc")
    rig.run()
    assert bytes(answer.tokens[0]) == b"abc"


def test_steps_without_a_grammar_start_no_thread(runner, monkeypatch):
    monkeypatch.setattr(MaskThread, "beside", lambda *_: pytest.fail("a thread for nothing"))
    rig = EngineRig(runner=runner)
    answer = rig.submit(PROMPT, max_tokens=3)
    rig.run()
    assert answer.finish == ["length"]


def test_a_grammar_that_fails_ends_its_own_request_only(runner, place, monkeypatch):
    run, sizes = runner._run, []
    monkeypatch.setattr(runner, "_run", lambda slots, copies: sizes.append(len(slots)) or run(slots, copies))
    rig = EngineRig(runner=runner)
    first = rig.submit(PROMPT, max_tokens=5, ignore_eos=True)
    broken = rig.submit(PROMPT, grammar_kind="regex", grammar=r"[^\s\S]")
    other = rig.submit(PROMPT, grammar_kind="regex", grammar="abc")
    rig.run()
    assert isinstance(broken.error, BadRequest)
    assert broken.error.message == "grammar: no token can follow"
    assert first.finish == ["length"]
    assert bytes(other.tokens[0]) == b"abc"
    assert sizes == [3, 2, 2, 1, 1], "no pass runs again"
    rig.assert_all_given_back()


def test_a_pass_that_fails_leaves_no_matcher_in_use(runner, monkeypatch):
    """Its parts run again one by one, with the same matchers, which are for one thread at a time."""
    monkeypatch.setattr(runner_module.os, "sched_getaffinity", lambda _pid: set(range(4096)))
    run, fill, num_steps = runner._run, GrammarMatcher.fill_masks, iter(range(1000))
    is_failing = threading.Event()

    def forward(*asked):
        if next(num_steps) == 0:
            is_failing.set()
            raise RuntimeError("a kernel")
        return run(*asked)

    def fill_masks(matchers, words):
        assert is_failing.wait(DEADLINE_S)
        return fill(matchers, words)

    monkeypatch.setattr(runner, "_run", forward)
    monkeypatch.setattr(GrammarMatcher, "fill_masks", staticmethod(fill_masks))
    rig = EngineRig(runner=runner)
    asked = [rig.submit(PROMPT, grammar_kind="regex", grammar=text) for text in ("abc", "xyz")]
    rig.run()
    assert [bytes(answer.tokens[0]) for answer in asked] == [b"abc", b"xyz"]


def test_a_cancelled_request_leaves_the_others_their_masks(runner, place):
    rig = EngineRig(runner=runner)
    rig.submit(PROMPT, grammar_kind="regex", grammar="a{50}")
    stays = rig.submit(PROMPT, grammar_kind="regex", grammar="b{20}")
    rig.step(5)
    rig.frontend.cancel(min(rig.frontend.answers))
    rig.run()
    assert bytes(stays.tokens[0]) == b"b" * 20
    rig.assert_all_given_back()


def test_what_a_grammar_leaves_alone_is_never_forbidden(runner):
    def hidden_by(grammar, forbidden):
        draw = Draw(Sampling(), 0, 3, forbidden=forbidden, matcher=runner.compile_grammar("regex", grammar))
        draws = [draw, draw._replace(matcher=runner.compile_grammar("regex", "[a-c]"))]
        first, other = find_hidden(draws, VOCABULARY, GrammarMatcher.fill_masks)
        assert np.flatnonzero(~other).tolist() == [ord(char) for char in "abc" if ord(char) not in forbidden]
        return np.flatnonzero(~first).tolist()

    assert hidden_by("[xy]", (ord("x"), 10_000)) == [ord("y")]
    assert hidden_by("x", (ord("x"),)) == [ord("x")]


def test_a_tokenizer_with_more_tokens_than_its_model_is_followed(runner):
    draws = [Draw(Sampling(), 0, 3, matcher=runner.compile_grammar("regex", text)) for text in ("a", "b")]
    found = find_hidden(draws, 200, GrammarMatcher.fill_masks)
    assert [np.flatnonzero(~row).tolist() for row in found] == [[97], [98]]
