"""Generation in the step loop, over a real ring: beside other models, with slow grammars, full rings and unloaded
models.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.config.generation_settings import Generation
from sie.config.sections import Memory, Scheduler
from sie.config.settings import Settings
from sie.ipc import messages
from sie.native import team
from sie.shm.attach import PendingAttachment
from sie.shm.large import LargeBudget
from sie.shm.space import OutboundSpace
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, InputTooLong, SieError
from sie.values.generate import Sampling
from sie.workers.generation.stub import StubGenerator
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.runners.stub import StubRunner
from sie.workers.scheduling.waiting import Budget
from tests.unit.engine_rig import Worker
from tests.unit.workers.generation_rig import MODEL, AheadStub, RingFrontend, echo, make_card

MIB = 1 << 20
SETTINGS = Settings(
    memory=Memory(request_segment_bytes=MIB, reply_segment_bytes=MIB, large_extent_bytes=MIB, ring_capacity=16),
    scheduler=Scheduler(max_step_items=64),
    generation=Generation(kv_block_tokens=8, grammar_timeout_s=60.0, max_prefill_tokens=64),
)


class LoopRig:
    """One step loop and one frontend, turned by hand."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.worker = Worker(0, settings, Budget(max_tokens=100, max_items=8, max_age_ns=10**9), 0)
        self.worker.build = lambda card: StubGenerator(card, 8) if card.generate else StubRunner(card)
        self._space = OutboundSpace.create("request", MIB, LargeBudget(0), large_extent_bytes=MIB)
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pending = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), 1, self._space, 16)
        pidfd = os.pidfd_open(os.getpid())
        self.worker.supervisor.send(messages.Attach(0, 1), [ends[1].fileno(), pidfd])
        ends[1].close()
        os.close(pidfd)
        self.worker.turn(2)
        attachment = pending.try_finish()
        assert attachment is not None
        self.frontend = RingFrontend(attachment, self._space)

    def load(self, card: ModelCard) -> None:
        self.worker.load(card.id, card)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.worker.turn()
            self.frontend.drain()

    def turn_until(self, is_done: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 60.0
        while not is_done():
            assert time.monotonic() < deadline_s, "the worker did not get there in time"
            self.worker.loop.run_once(0.01)
            self.frontend.drain()

    def error(self, request_id: int) -> SieError | None:
        self.turn_until(lambda: self.frontend.answers[request_id].is_over)
        return self.frontend.answers[request_id].error

    @property
    def num_leased(self) -> int:
        return sum(link.num_leased for link in self.worker.loop._links.values())

    def close(self) -> None:
        self.frontend.attachment.close()
        self.worker.close()
        self._space.close()


@pytest.fixture
def rig() -> Iterator[LoopRig]:
    rig = LoopRig()
    yield rig
    rig.close()


@pytest.fixture
def may_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return what the compilation of each grammar waits for."""
    event, compile_grammar = threading.Event(), StubGenerator.compile_grammar

    def wait(self: StubGenerator, kind: str, text: str) -> Any:
        assert event.wait(60.0)
        return compile_grammar(self, kind, text)

    monkeypatch.setattr(StubGenerator, "compile_grammar", wait)
    yield event
    event.set()


def test_answers_come_over_the_ring_and_leave_nothing_behind(rig: LoopRig) -> None:
    rig.load(make_card())
    requests = [rig.frontend.generate(b"prompt %d" % number, num_choices=2) for number in range(5)]
    rig.turn_until(lambda: all(rig.frontend.answers[request].is_over for request in requests))
    for number, request in enumerate(requests):
        prompt = list(b"prompt %d" % number)
        assert rig.frontend.answers[request].tokens == [echo(prompt), echo(prompt, 1)]
        assert rig.frontend.answers[request].totals is not None
    rig.turn(2)
    assert rig.num_leased == 0
    assert not rig.worker.loop._state


def test_ring_that_nobody_reads_costs_no_token(rig: LoopRig) -> None:
    rig.load(make_card())
    request = rig.frontend.generate(b"a prompt", ignore_eos=True, max_tokens=200)
    rig.worker.turn(250)
    assert rig.frontend.answers[request].tokens == [[]]
    rig.turn_until(lambda: rig.frontend.answers[request].is_over)
    assert rig.frontend.answers[request].tokens == [echo(list(b"a prompt"), count=200)]
    assert rig.frontend.answers.num_frames < 20


def test_what_lent_cores_save_is_not_learned_as_the_pace_of_a_stream(rig: LoopRig, monkeypatch) -> None:
    saved_ns = itertools.count(0, 10**10)
    monkeypatch.setattr(team, "saved_ns", lambda: next(saved_ns))
    rig.load(make_card())
    request = rig.frontend.generate(b"prompt", ignore_eos=True, max_tokens=4)
    rig.turn_until(lambda: rig.frontend.answers[request].is_over)
    pace = rig.worker.loop._generators._pace
    assert min(pace.allowed_ns(MODEL, 1), pace.allowed_ns(f"{MODEL} decode", 1)) > 10**10


def test_texts_and_streams_share_the_worker(rig: LoopRig) -> None:
    rig.load(make_card("latency_ms=2"))
    rig.load(stub_card(parse_model_spec("stub/e=stub:dense=16,latency_ms=2")))
    streams = [rig.frontend.generate(b"stream", ignore_eos=True) for _ in range(4)]

    def both_have_come_far() -> bool:
        while rig.frontend.num_encoding < 4:  # never so few that the queue is empty
            rig.frontend.encode("stub/e", b"text")
        num_tokens = min(len(rig.frontend.answers[stream].tokens[0]) for stream in streams)
        return min(num_tokens, len(rig.frontend.encoded)) >= 50

    rig.turn_until(both_have_come_far)


def test_slow_grammar_makes_only_its_own_request_wait(rig: LoopRig, may_compile: threading.Event) -> None:
    rig.load(make_card())
    bound = rig.frontend.generate(b"x", grammar_kind="regex", grammar="yes", sampling=Sampling(temperature=0.0))
    free = rig.frontend.generate(b"free")
    rig.turn_until(lambda: rig.frontend.answers[free].is_over)
    assert rig.frontend.answers[bound].tokens == [[]]
    may_compile.set()
    rig.turn_until(lambda: rig.frontend.answers[bound].is_over)
    assert bytes(rig.frontend.answers[bound].tokens[0]) == b"yes"


def test_grammar_of_many_choices_is_compiled_once(rig: LoopRig, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_grammar = StubGenerator.compile_grammar

    def count(self: StubGenerator, kind: str, text: str) -> Any:
        compiled.append(text)
        return compile_grammar(self, kind, text)

    monkeypatch.setattr(StubGenerator, "compile_grammar", count)
    rig.load(make_card())
    task = {"grammar_kind": "regex", "grammar": "yes", "num_choices": 4}
    bound = rig.frontend.generate(b"x", sampling=Sampling(temperature=0.0), **task)
    rig.turn_until(lambda: rig.frontend.answers[bound].is_over)
    assert [bytes(tokens) for tokens in rig.frontend.answers[bound].tokens] == [b"yes"] * 4
    assert compiled == ["yes"]


def test_grammar_that_takes_too_long_is_refused(may_compile: threading.Event) -> None:
    generation = msgspec.structs.replace(SETTINGS.generation, grammar_timeout_s=0.2)
    with contextlib.closing(LoopRig(msgspec.structs.replace(SETTINGS, generation=generation))) as rig:
        rig.load(make_card())
        error = rig.error(rig.frontend.generate(b"x", grammar_kind="regex", grammar="yes"))
        may_compile.set()
    assert isinstance(error, BadRequest)
    assert "grammar_timeout_s (0.2 s)" in error.message


def test_wrong_grammar_is_the_client_s_mistake(rig: LoopRig) -> None:
    rig.load(make_card())
    error = rig.error(rig.frontend.generate(b"x", grammar_kind="regex", grammar="  "))
    assert isinstance(error, BadRequest)
    assert "blank" in error.message


def test_cancelled_request_whose_grammar_compiles_is_gone_at_once(rig: LoopRig, may_compile: threading.Event) -> None:
    rig.load(make_card())
    others = threading.enumerate()
    request = rig.frontend.generate(b"x", grammar_kind="regex", grammar="yes")
    rig.turn()
    (compiling,) = set(threading.enumerate()).difference(others)
    rig.frontend.cancel(request)
    rig.turn()
    assert rig.frontend.answers[request].is_cancelled
    may_compile.set()
    rig.turn_until(lambda: not compiling.is_alive())
    rig.turn()
    assert not rig.worker.loop._state, "its prompt does not run after all"


@pytest.mark.parametrize(
    ("prompt", "task", "message"),
    [
        (b"", {}, "prompt"),
        (b"abc", {"max_tokens": -1}, "max_tokens"),
        (b"abc", {"num_choices": 65}, "n is 65"),
        (b"abc", {"sampling": Sampling(logit_bias=((257, 1.0),))}, "logit_bias: token 257"),
    ],
)
def test_what_no_model_could_run_is_refused_with_its_name(
    rig: LoopRig, prompt: bytes, task: dict[str, object], message: str
) -> None:
    rig.load(make_card())
    error = rig.error(rig.frontend.generate(prompt, **task))
    assert isinstance(error, BadRequest)
    assert message in error.message


def test_prompt_over_the_whole_pool_is_refused(rig: LoopRig) -> None:
    rig.load(make_card("blocks=4"))
    error = rig.error(rig.frontend.generate(b"x" * 32))
    assert isinstance(error, InputTooLong)
    assert "32 tokens" in error.message


def test_request_to_generate_is_refused_by_a_model_of_vectors(rig: LoopRig) -> None:
    rig.load(stub_card(parse_model_spec(f"{MODEL}=stub:dense=16")))
    error = rig.error(rig.frontend.generate(b"abc"))
    assert isinstance(error, BadRequest)


def test_request_with_an_adapter_is_refused(rig: LoopRig) -> None:
    rig.load(make_card())
    error = rig.error(rig.frontend.generate(b"abc", lora="tone"))
    assert error is not None
    assert "tone" in error.message


def test_model_that_goes_finishes_its_streams_and_takes_no_more(rig: LoopRig) -> None:
    rig.load(make_card())
    rig.worker.heard()
    request = rig.frontend.generate(b"stream", ignore_eos=True, max_tokens=30)
    rig.turn(3)
    rig.worker.supervisor.send(messages.Unload(MODEL))
    rig.turn(2)
    late = rig.error(rig.frontend.generate(b"late"))
    assert late is not None
    assert late.code == "MODEL_NOT_LOADED"
    assert (MODEL, "available") not in rig.worker.states()
    rig.turn_until(lambda: rig.frontend.answers[request].is_over)
    assert len(rig.frontend.answers[request].tokens[0]) == 30
    rig.turn_until(lambda: (MODEL, "available") in rig.worker.states())
    rig.load(make_card())
    again = rig.frontend.generate(b"again")
    rig.turn_until(lambda: rig.frontend.answers[again].is_over)
    assert bytes(rig.frontend.answers[again].tokens[0]) == b"again"


def test_steps_without_memory_are_counted_and_ask_for_some(rig: LoopRig) -> None:
    rig.load(make_card("oom_tokens=20"))
    rig.worker.heard()
    request = rig.frontend.generate(b"x" * 60, max_tokens=3)
    rig.turn_until(lambda: rig.frontend.answers[request].is_over)
    assert bytes(rig.frontend.answers[request].tokens[0]) == b"xxx"
    counts = {record.name: record.value for record in rig.worker.counters.records()}
    # 60 tokens, then 30, then 15.
    assert counts["sie_oom_recoveries_attempted_total"] == counts["sie_oom_batch_splits_total"] == 2
    assert counts["sie_oom_recoveries_succeeded_total"] == 1
    assert counts["sie_oom_terminal_failures_total"] == 0
    assert messages.MemoryShort(MODEL) in rig.worker.heard()


def test_figures_of_a_model_follow_its_requests(rig: LoopRig) -> None:
    rig.load(make_card("blocks=64"))
    for _ in range(2):
        request = rig.frontend.generate(b"y" * 20, max_tokens=5)
        rig.turn_until(lambda request=request: rig.frontend.answers[request].is_over)
    rig.frontend.generate(b"z" * 20, num_choices=2, ignore_eos=True)
    rig.turn(3)
    counts = {
        (record.name, dict(record.labels).get("reason")): record.value for record in rig.worker.counters.records()
    }
    wanted = {
        "sie_sequences_running": 2, "sie_sequences_waiting": 0, "sie_kv_cache_blocks": 64, "sie_kv_cache_blocks_used": 4,
        "sie_prefix_cache_lookups_total": 3, "sie_prefix_cache_hits_total": 1, "sie_preemptions_total": 0,
        "sie_prompt_tokens_total": 20 + 4 + 20,
    }  # fmt: skip
    assert {name: counts[name, None] for name in wanted} == wanted
    assert counts["sie_sequences_completed_total", "length"] == 2


def test_streams_of_a_frontend_that_dies_hold_no_blocks(rig: LoopRig) -> None:
    rig.load(make_card())
    rig.frontend.generate(b"stream", ignore_eos=True)
    rig.turn(5)
    (link,) = rig.worker.loop._links.values()
    rig.worker.loop._detach(link)
    assert rig.worker.loop._generators.engines[MODEL].planner.pool.num_used == 0
    assert not rig.worker.loop._state


def test_the_page_names_a_step_under_way_until_it_is_read(rig: LoopRig) -> None:
    rig.worker.build = lambda card: AheadStub(card, 8)
    rig.load(make_card())
    request = rig.frontend.generate(b"prompt")
    rig.turn()
    page = rig.worker.page.read()
    assert (page.phase, [entry.request_id for entry in page.entries]) == ("step", [request])
    rig.turn_until(lambda: rig.frontend.answers[request].is_over)
    assert bytes(rig.frontend.answers[request].tokens[0]) == b"prompt"
    assert rig.worker.page.read().phase == "step", "the token behind the end"
    rig.turn(2)
    assert rig.worker.page.read().phase == "idle"


def test_a_model_is_unloaded_when_its_last_step_is_read(rig: LoopRig) -> None:
    rig.worker.build = lambda card: AheadStub(card, 8)
    rig.load(make_card())
    rig.worker.heard()
    request = rig.frontend.generate(b"prompt")
    rig.turn(3)
    rig.worker.supervisor.send(messages.Unload(MODEL))
    rig.turn_until(lambda: rig.frontend.answers[request].is_over)
    rig.turn_until(lambda: (MODEL, "available") in rig.worker.states())
    assert not rig.worker.loop._state


def test_steps_of_other_models_begin_when_none_is_under_way(rig: LoopRig) -> None:
    generator = AheadStub(make_card(), 8)

    class Alone(StubRunner):
        def run(self, step: RowStep) -> StepOutputs:
            assert not generator._under_way
            return super().run(step)

    rig.worker.build = lambda card: generator if card.generate else Alone(card)
    rig.load(make_card())
    rig.load(stub_card(parse_model_spec("stub/e=stub:dense=16")))
    stream = rig.frontend.generate(b"stream", ignore_eos=True, max_tokens=40)
    rig.turn(3)
    for _ in range(6):
        rig.frontend.encode("stub/e", b"text")
        rig.turn(2)
    rig.turn_until(lambda: rig.frontend.answers[stream].is_over and len(rig.frontend.encoded) == 6)
    assert rig.frontend.answers[stream].tokens == [echo(list(b"stream"), count=40)]
    assert generator.num_behind > 20


def test_vectors_of_a_model_that_generates_ahead_run_whole(rig: LoopRig) -> None:
    class Both(AheadStub):
        def run(self, step: RowStep) -> StepOutputs:
            assert not self._under_way
            return StepOutputs(np.ones((len(step.inputs), 16), np.float32))

    rig.worker.build = lambda card: Both(card, 8)
    rig.load(msgspec.structs.replace(make_card(), outputs=("generate", "dense"), dims={"dense": 16}))
    stream = rig.frontend.generate(b"stream", ignore_eos=True, max_tokens=20)
    rig.turn(3)
    rig.frontend.encode(MODEL, b"text")
    rig.turn_until(lambda: rig.frontend.answers[stream].is_over and rig.frontend.encoded)
    assert rig.frontend.answers[stream].tokens == [echo(list(b"stream"), count=20)]
