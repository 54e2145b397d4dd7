"""Generated answers at a gateway: order of frames, lost hosts, cancellation and deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

from sie.cluster.gateway import remote_run
from sie.cluster.gateway.host_directory import Host
from sie.cluster.gateway.remote_run import RemoteRun
from sie.cluster.gateway.text_client import TextClient
from sie.cluster.payloads import (
    VERSION,
    Beat,
    CountResult,
    ModelBeat,
    TextFrame,
    TextWork,
    count_work_decoder,
    decode,
    encode,
    text_work_decoder,
)
from sie.cluster.subjects import answer_subject
from sie.cluster.text_events import encode_events
from sie.config.generation_settings import Generation
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    Overloaded,
    SieError,
    Unavailable,
    WorkerLost,
    to_wire,
)
from sie.values.generate import (
    Ended,
    Finished,
    GenerateEvent,
    GenerateRequest,
    GenerateRule,
    GenerateUsage,
    Started,
    TextDelta,
)
from tests.unit.cluster.fakes import FakeConnection

ENTRY = ModelEntry(card=ModelCard(id="m", kind="generator", generate=GenerateRule(context_length=100)), state="loaded")
END = (Finished(0, "stop"), Ended(GenerateUsage(prompt_tokens=1, completion_tokens=2)))


LARGE = 1_100_000
POOL = ContextVar("pool", default="p")
ANSWER = answer_subject("gw", "p", "text")


class Bench:
    """A client before two hosts that a test plays."""

    def __init__(self) -> None:
        self.connection = FakeConnection()
        served = {"m": ModelBeat("loaded", is_served=True)}
        self.hosts = [Host(Beat(VERSION, f"h{n}", "", "p", "", "", "", served), 0.0) for n in range(2)]
        meter = SimpleNamespace(record_first_token=lambda *_: None, record_next_token=lambda *_: None)
        self.client = TextClient(
            self.connection, "gw", self.choose, settings=Generation(), meter=meter,  # type: ignore[arg-type]
        )  # fmt: skip

    def choose(self, _model: str) -> list[Host]:
        return [host for host in self.hosts if host.beat.pool == POOL.get()]

    def sent(self) -> list[tuple[str, TextWork]]:
        """Return the requests that were sent to hosts, each with its host."""
        return [
            (subject.split(".")[4], decode(data, text_work_decoder))
            for subject, data in self.connection.published if subject.endswith(".text")
        ]  # fmt: skip

    def cancelled(self) -> list[str]:
        return [subject.split(".")[4] for subject, _ in self.connection.published if subject.endswith(".cancel")]

    async def start(self, left_ns: int = 60_000_000_000) -> RemoteRun:
        """Start a request, whose host begins to answer."""
        request = GenerateRequest(model="m", texts=["hello"])
        starting = asyncio.create_task(self.client.start(ENTRY, request, time.monotonic_ns() + left_ns))
        await until(self.sent)
        self.frame(0)
        return await starting

    def frame(
        self, sequence: int, *events: GenerateEvent, is_over: bool = False, error: SieError | None = None, tokens: int = 0
    ) -> None:  # fmt: skip
        wire = to_wire(error) if error is not None else None
        work_id = self.sent()[-1][1].id
        self.client.on_frame(
            TextFrame(
                VERSION,
                work_id,
                sequence,
                encode_events(events),
                is_over,
                wire,
                num_prompts=int(not sequence),
                prompt_tokens=7 if tokens else 0,
                completion_tokens=tokens,
            ),
            ANSWER,
        )


def run(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        async with asyncio.timeout(60):
            await test(Bench())

    asyncio.run(body())


async def until(condition: Callable[[], Any]) -> None:
    """Let other tasks run until a condition holds; the test's time limit ends it."""
    while not condition():  # noqa: ASYNC110  # what is waited for is a list of a fake
        await asyncio.sleep(0)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_events_come_in_order_and_the_whole_is_joined():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, Started(1, 0), TextDelta(0, "he"))
        bench.frame(2, TextDelta(0, "llo"), *END, is_over=True)
        reply = await answer.whole()
        assert (reply.choices[0].text, reply.choices[0].reason, reply.usage.completion_tokens) == ("hello", "stop", 2)
        assert bench.client.num_pending == 0

    run(test)


def test_usage_is_that_of_the_last_frame_whether_it_was_read_or_not():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, Started(7, 0), TextDelta(0, "a"), tokens=3)
        assert (answer.usage().prompt_tokens, answer.usage().completion_tokens) == (7, 3)
        bench.frame(2, *END, is_over=True)
        await answer.wait(1.0)
        assert answer.usage().completion_tokens == 2

    run(test)


def test_a_missing_frame_ends_a_stream_that_the_client_has_some_of():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, TextDelta(0, "a"))
        assert await answer.wait(1.0) == [TextDelta(0, "a")]
        bench.frame(3, TextDelta(0, "c"))
        with pytest.raises(WorkerLost):
            await answer.wait(1.0)
        await turns()
        assert bench.cancelled()

    run(test)


def test_an_answer_with_a_missing_frame_starts_again_elsewhere_before_the_client_has_some_of_it():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, TextDelta(0, "a"))
        bench.frame(3, TextDelta(0, "c"))
        await turns()
        (first, _), (second, _) = bench.sent()
        assert first != second
        assert bench.cancelled() == [first], "it generates for nobody"
        bench.frame(0)
        bench.frame(1, TextDelta(0, "whole"), *END, is_over=True)
        assert (await answer.whole()).choices[0].text == "whole"

    run(test)


def test_a_request_that_its_host_never_got_is_sent_again_at_its_heartbeat(monkeypatch):
    monkeypatch.setattr(remote_run, "_PATIENCE_NS", 0)

    async def test(bench: Bench) -> None:
        request = GenerateRequest(model="m", texts=["hello"])
        starting = asyncio.create_task(bench.client.start(ENTRY, request, time.monotonic_ns() + 60_000_000_000))
        await until(bench.sent)
        ((host, first),) = bench.sent()
        for other in {"h0", "h1"} - {host}:
            bench.client.on_beat(other)
        bench.client.on_beat(host)
        await turns()
        assert bench.sent() == [(host, first)] * 2, "the same id, so that it runs once"
        bench.frame(0)
        bench.frame(1, TextDelta(0, "hi"), *END, is_over=True)
        assert (await (await starting).whole()).choices[0].text == "hi"
        bench.client.on_beat(host)
        await turns()
        assert len(bench.sent()) == 2

    run(test)


def test_a_request_that_was_just_sent_is_not_sent_again():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.client.on_beat(answer.host)
        await turns()
        assert len(bench.sent()) == 1

    run(test)


def test_an_answer_that_its_host_begins_anew_replaces_what_came_before():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, TextDelta(0, "lost"))
        bench.frame(0)  # NATS was away, and the host gave the first one up
        bench.frame(1, TextDelta(0, "whole"), *END, is_over=True)
        assert (await answer.whole()).choices[0].text == "whole"

    run(test)


def test_an_answer_that_its_host_begins_anew_ends_a_stream_that_the_client_has_some_of():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, TextDelta(0, "a"))
        await answer.wait(1.0)
        bench.frame(0)
        with pytest.raises(WorkerLost):
            await answer.wait(1.0)
        await turns()
        assert bench.cancelled() == [answer.host]

    run(test)


def test_a_lost_host_s_answer_starts_again_elsewhere_until_the_client_has_some_of_it():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, TextDelta(0, "lost"))
        bench.client.on_silent({answer.host})
        await turns()
        (first, _), (second, _) = bench.sent()
        assert first != second
        bench.frame(0)
        bench.frame(1, TextDelta(0, "whole"), *END, is_over=True)
        assert (await answer.whole()).choices[0].text == "whole"

    run(test)


def test_an_answer_starts_again_in_its_request_s_pool_and_comes_back_from_there():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        POOL.set("other")  # as in the task that hears of lost hosts
        served = {"m": ModelBeat("loaded", is_served=True)}
        bench.hosts += [Host(Beat(VERSION, "h2", "", "other", "", "", "", served), 0.0)]
        bench.client.on_silent({answer.host})
        await turns()
        (first, _), (second, work) = bench.sent()
        assert {first, second} == {"h0", "h1"}
        assert work.reply_to == ANSWER

    run(test)


def test_a_lost_host_ends_a_stream_that_the_client_has_some_of():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, TextDelta(0, "a"))
        await answer.wait(1.0)
        bench.client.on_silent({answer.host})
        with pytest.raises(WorkerLost):
            await answer.wait(1.0)
        assert len(bench.sent()) == 1

    run(test)


def test_frames_of_a_host_that_was_given_up_are_ignored():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        old = bench.sent()[0][1].id
        bench.client.on_silent({answer.host})
        await turns()
        bench.client.on_frame(TextFrame(VERSION, old, 1, encode_events([TextDelta(0, "late")])), ANSWER)
        bench.frame(0)
        bench.frame(1, TextDelta(0, "new"), *END, is_over=True)
        assert (await answer.whole()).choices[0].text == "new"

    run(test)


def test_a_refusal_of_the_request_is_the_client_s():
    async def test(bench: Bench) -> None:
        request = GenerateRequest(model="m", texts=["hello"])
        starting = asyncio.create_task(bench.client.start(ENTRY, request, time.monotonic_ns() + 60_000_000_000))
        await until(bench.sent)
        bench.frame(0, error=BadRequest("too long"))
        with pytest.raises(BadRequest, match="too long"):
            await starting
        assert bench.client.num_pending == 0

    run(test)


def test_a_client_that_leaves_cancels_the_generation():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        answer.give_up(ClientGone("gone"))
        await turns()
        assert bench.cancelled() == [answer.host]
        assert bench.client.num_pending == 0

    run(test)


def test_an_answer_without_a_token_ends_at_its_deadline():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.client.expire(answer.deadline_ns)
        with pytest.raises(DeadlineExceeded):
            await answer.whole()

    run(test)


def test_a_host_of_another_pool_cannot_add_to_an_answer():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        forged = TextFrame(VERSION, bench.sent()[0][1].id, 1, encode_events([TextDelta(0, "forged")]))
        bench.client.on_frame(forged, answer_subject("gw", "other", "text"))
        bench.frame(1, TextDelta(0, "true"), *END, is_over=True)
        assert (await answer.whole()).choices[0].text == "true"

    run(test)


def test_a_request_over_a_mebibyte_goes_by_reference_until_its_answer_has_ended(monkeypatch):
    monkeypatch.setattr(remote_run, "_PATIENCE_NS", 0)

    async def test(bench: Bench) -> None:
        request = GenerateRequest(model="m", texts=["a" * LARGE])
        starting = asyncio.create_task(bench.client.start(ENTRY, request, time.monotonic_ns() + 60_000_000_000))
        await until(bench.sent)
        ((host, work),) = bench.sent()
        assert work.request.texts is None
        assert decode(bench.connection.objects[work.stored], text_work_decoder).request == request
        bench.connection.objects.clear()  # as a restarted server does
        bench.client.on_connected()
        bench.client.on_beat(host)
        await turns()
        assert bench.sent()[1] == (host, work)
        assert work.stored in bench.connection.objects
        bench.frame(0)
        bench.frame(1, TextDelta(0, "hi"), *END, is_over=True)
        assert (await (await starting).whole()).choices[0].text == "hi"
        await turns()
        assert not bench.connection.objects

    run(test)


def test_a_request_over_a_mebibyte_starts_again_elsewhere():
    async def test(bench: Bench) -> None:
        request = GenerateRequest(model="m", texts=["a" * LARGE])
        starting = asyncio.create_task(bench.client.start(ENTRY, request, time.monotonic_ns() + 60_000_000_000))
        await until(bench.sent)
        bench.frame(0, error=Overloaded("full"))
        await turns()
        (first, old), (second, new) = bench.sent()
        assert first != second
        assert (old.id != new.id, old.stored) == (True, new.stored)
        bench.frame(0)
        bench.frame(1, TextDelta(0, "hi"), *END, is_over=True)
        assert (await (await starting).whole()).choices[0].text == "hi"

    run(test)


def refer(bench: Bench, sequence: int, *events: GenerateEvent, is_kept: bool = True) -> None:
    """Have the host send a frame by reference."""
    work_id = bench.sent()[-1][1].id
    frame = TextFrame(VERSION, work_id, sequence, encode_events(events))
    if is_kept:
        bench.connection.objects["large"] = encode(frame)
    bench.client.on_frame(TextFrame(VERSION, work_id, sequence, stored="large"), ANSWER)


def test_frames_by_reference_keep_their_place_and_leave_the_store():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        refer(bench, 1, TextDelta(0, "large, "))
        bench.frame(2, TextDelta(0, "small"), *END, is_over=True)
        assert (await answer.whole()).choices[0].text == "large, small"
        await turns()
        assert not bench.connection.objects

    run(test)


def test_a_large_frame_of_an_answer_that_has_ended_leaves_the_store():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        answer.give_up(ClientGone("the client left"))
        frame = TextFrame(VERSION, bench.sent()[-1][1].id, 1, stored="large")
        bench.connection.objects["large"] = b"content"
        bench.client.on_frame(frame, answer_subject("gw", "other", "text"))
        await turns()
        assert bench.connection.objects, "a host of another pool has no say"
        bench.client.on_frame(frame, ANSWER)
        await turns()
        assert not bench.connection.objects

    run(test)


def test_a_frame_that_is_not_in_the_store_is_a_lost_part_of_the_answer():
    async def test(bench: Bench) -> None:
        answer = await bench.start()
        bench.frame(1, TextDelta(0, "a"))
        await answer.wait(1.0)
        refer(bench, 2, TextDelta(0, "b"), is_kept=False)
        with pytest.raises(WorkerLost, match="frame 2"):
            await answer.wait(1.0)

    run(test)


def test_another_host_counts_tokens_if_the_first_does_not_answer(monkeypatch):
    async def test(bench: Bench) -> None:
        asked: list[str] = []

        async def call(subject: str, _data: bytes, _timeout_s: float) -> bytes:
            asked.append(subject)
            if len(asked) == 1:
                raise Unavailable("no answer", code="UPSTREAM_UNAVAILABLE")
            return encode(CountResult(VERSION, prompts=[[1, 2]]))

        monkeypatch.setattr(bench.connection, "call", call, raising=False)
        assert await bench.client.prompt_ids(ENTRY, GenerateRequest(model="m", texts=["a"])) == [[1, 2]]
        assert len(set(asked)) == 2
        asked.clear()
        bench.hosts.pop()
        with pytest.raises(Unavailable, match="no answer"):
            await bench.client.prompt_ids(ENTRY, GenerateRequest(model="m", texts=["a"]))

    run(test)


def test_the_tokens_of_a_prompt_over_a_mebibyte_are_counted(monkeypatch):
    async def test(bench: Bench) -> None:
        request = GenerateRequest(model="m", texts=["a" * LARGE])

        async def call(_subject: str, data: bytes, _timeout_s: float) -> bytes:
            work = decode(data, count_work_decoder)
            assert work.request.texts is None
            assert decode(bench.connection.objects.pop(work.stored), count_work_decoder).request == request
            bench.connection.objects["many"] = encode(CountResult(VERSION, prompts=[[1, 2, 3]]))
            return encode(CountResult(VERSION, stored="many"))

        monkeypatch.setattr(bench.connection, "call", call, raising=False)
        assert await bench.client.prompt_ids(ENTRY, request) == [[1, 2, 3]]
        assert not bench.connection.objects

    run(test)
