"""Generated answers at a host: frames, errors, and gateways that no longer beat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from sie.cluster.host import text_runs
from sie.cluster.host.text_runs import TextRuns
from sie.cluster.payloads import (
    VERSION,
    CountWork,
    GatewayBeat,
    TextFrame,
    TextWork,
    count_result_decoder,
    decode,
    encode,
    text_frame_decoder,
)
from sie.cluster.text_events import decode_events
from sie.config.cluster_settings import Cluster
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import SieError, Unavailable, from_wire
from sie.values.generate import Ended, GenerateEvent, GenerateRequest, GenerateRule, GenerateUsage, TextDelta
from tests.unit.cluster.fakes import FakeConnection

ENTRY = ModelEntry(card=ModelCard(id="m", kind="generator", generate=GenerateRule(context_length=100)), state="loaded")
USAGE = GenerateUsage(prompt_tokens=1, completion_tokens=2)
REQUEST = GenerateRequest(model="m", texts=["hello"])
LARGE = "a" * 1_100_000
REPLY_TO = "sie.v1.gateway.gw.p.text"


class Run:
    """An answer whose events a test gives."""

    def __init__(self) -> None:
        self.is_over = False
        self.num_prompts = 1
        self.prompts: list[str] = []
        self.events: asyncio.Queue[list[GenerateEvent]] = asyncio.Queue()
        self.given_up: SieError | None = None

    async def wait(self, _timeout_s: float) -> list[GenerateEvent]:
        events = await self.events.get()
        self.is_over = any(isinstance(event, Ended) for event in events)
        return events

    def usage(self) -> GenerateUsage:
        return USAGE

    def give_up(self, error: SieError) -> None:
        self.given_up = error


class Bench:
    """The answers of one host on a fake connection."""

    def __init__(self) -> None:
        self.connection = FakeConnection()
        self.runs: list[Run] = []
        self.prompts: list[str] = []
        self.requests: list[GenerateRequest] = []
        models = SimpleNamespace(find=lambda _model: ENTRY, check_serving=lambda _entry: None)
        process = SimpleNamespace(
            settings=SimpleNamespace(cluster=Cluster()), models=models, generator=SimpleNamespace(start=self.start)
        )
        self.texts = TextRuns(process, self.connection, "p")  # type: ignore[arg-type]

    async def start(self, _entry: ModelEntry, request: GenerateRequest, *_: object, **__: object) -> Run:
        self.requests.append(request)
        made = Run()
        made.prompts = self.prompts
        self.runs.append(made)
        return made

    async def ask(self, stored: str = "") -> Run:
        """Ask for an answer, and return it when it has begun."""
        deadline_ns = self.connection.clock.to_server(time.monotonic_ns() + 60_000_000_000)
        work = TextWork(VERSION, "t1", "gw", REPLY_TO, deadline_ns, "m", REQUEST, stored=stored)
        await self.texts.on_text(SimpleNamespace(data=encode(work)))  # type: ignore[arg-type]
        await turns()
        return self.runs[-1]

    async def beat(self) -> None:
        await self.texts.on_gateway_beat(SimpleNamespace(data=encode(GatewayBeat(VERSION, "gw"))))  # type: ignore[arg-type]

    def frames(self) -> list[TextFrame]:
        """Return what was published, with the content that lies in the store."""
        found = []
        for subject, data in self.connection.published:
            assert len(data) < 1 << 20
            if subject == REPLY_TO:
                frame = decode(data, text_frame_decoder)
                found.append(
                    decode(self.connection.objects[frame.stored], text_frame_decoder) if frame.stored else frame
                )
        return found


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(60):
            await test(Bench())

    asyncio.run(body())


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_answer_is_numbered_frames():
    async def test(bench: Bench) -> None:
        answer = await bench.ask()
        answer.events.put_nowait([TextDelta(0, "hi")])
        await turns()
        answer.events.put_nowait([Ended(USAGE)])
        await turns()
        shown = [(frame.sequence, decode_events(frame.events), frame.is_over) for frame in bench.frames()]
        assert shown == [(0, [], False), (1, [TextDelta(0, "hi")], False), (2, [Ended(USAGE)], True)]
        assert bench.texts.num_running == 0

    run(test)


def test_a_request_that_comes_again_while_it_runs_runs_once():
    async def test(bench: Bench) -> None:
        await bench.ask()
        await bench.ask()
        assert (len(bench.runs), len(bench.frames())) == (1, 1)

    run(test)


def test_a_gateway_that_no_longer_beats_is_told_that_its_answers_ended_and_may_ask_again(monkeypatch):
    monkeypatch.setattr(text_runs, "_STALE_S", -1.0)

    async def test(bench: Bench) -> None:
        answer = await bench.ask()
        answer.events.put_nowait([TextDelta(0, "hi")])
        await turns()
        bench.texts.tick()
        bench.texts.tick()
        await turns()
        last = bench.frames()[-1]
        assert last.error is not None
        assert (len(bench.frames()), last.sequence, from_wire(last.error).code) == (3, 2, "WORKER_LOST")
        assert answer.given_up is not None
        assert bench.texts.num_running == 0
        await bench.ask()
        assert len(bench.runs) == 2

    run(test)


def test_a_host_that_stops_says_which_answers_it_cannot_complete():
    async def test(bench: Bench) -> None:
        await bench.ask()
        await bench.texts.drain(time.monotonic())
        last = bench.frames()[-1]
        assert last.error is not None
        assert (last.sequence, from_wire(last.error).code) == (1, "WORKER_LOST")
        assert bench.texts.num_running == 0

    run(test)


def test_an_answer_goes_on_while_its_gateway_beats():
    async def test(bench: Bench) -> None:
        await bench.ask()
        await bench.beat()
        bench.texts.tick()
        await turns()
        assert bench.texts.num_running == 1

    run(test)


@pytest.mark.parametrize("number", [0, 1])
def test_a_frame_that_cannot_be_sent_ends_the_answer_with_an_error(monkeypatch, number):
    async def test(bench: Bench) -> None:
        publish, told = bench.connection.publish, []

        async def refuse(subject: str, data: bytes, reply: str = "") -> None:
            told.append(data)
            if len(told) == number + 1:
                raise Unavailable("too large")
            await publish(subject, data, reply)

        monkeypatch.setattr(bench.connection, "publish", refuse)
        answer = await bench.ask()
        answer.events.put_nowait([TextDelta(0, "hi")])
        await turns()
        last = bench.frames()[-1]
        assert last.error is not None
        assert (last.sequence, from_wire(last.error).message) == (number, "too large")
        assert answer.given_up is not None

    run(test)


def test_a_request_by_reference_is_read_from_the_store():
    async def test(bench: Bench) -> None:
        request = GenerateRequest(model="m", texts=[LARGE])
        bench.connection.objects["large"] = encode(TextWork(VERSION, "t0", "gw", REPLY_TO, 0, "m", request))
        await bench.ask(stored="large")
        assert bench.requests == [request]

    run(test)


def test_frames_over_a_mebibyte_go_by_reference():
    async def test(bench: Bench) -> None:
        bench.prompts = [LARGE]
        answer = await bench.ask()
        answer.events.put_nowait([TextDelta(0, LARGE)])
        await turns()
        first, second = bench.frames()
        assert (first.prompts, decode_events(second.events)) == ([LARGE], [TextDelta(0, LARGE)])

    run(test)


def test_counts_over_a_mebibyte_go_by_reference_both_ways():
    async def test(bench: Bench) -> None:
        request, tokens = GenerateRequest(model="m", texts=[LARGE]), [[7] * 1_100_000]
        bench.connection.objects["large"] = encode(CountWork(VERSION, "m", request))
        asked: list[GenerateRequest] = []

        async def prompt_ids(_entry: ModelEntry, request: GenerateRequest) -> list[list[int]]:
            asked.append(request)
            return tokens

        bench.texts._process.generator = SimpleNamespace(prompt_ids=prompt_ids)  # type: ignore[misc, assignment]
        data = encode(CountWork(VERSION, "m", REQUEST, "large"))
        await bench.texts.on_count(SimpleNamespace(data=data, reply="inbox"))  # type: ignore[arg-type]
        ((subject, answer),) = bench.connection.published
        told = decode(answer, count_result_decoder)
        assert (subject, asked, told.prompts) == ("inbox", [request], [])
        assert bench.connection.objects.keys() == {told.stored}
        assert decode(bench.connection.objects[told.stored], count_result_decoder).prompts == tokens

    run(test)
