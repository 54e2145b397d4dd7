"""Work items of a gateway: duplicates, late and lost answers, reconnects, oversized payloads and a full stream."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import pytest

from sie.cluster.connection import INLINE_BYTES
from sie.cluster.gateway.fair_queue import Caller
from sie.cluster.gateway.in_flight import InFlight
from sie.cluster.gateway.requested_placement import Placement
from sie.cluster.gateway.work_items import RemotePending, RemoteReply
from sie.cluster.payloads import VERSION, DeadLetter, Result, Taken, Work, decode, works_decoder
from sie.cluster.request_forms import Piece
from sie.cluster.subjects import Lane, answer_subject, dead_subject, work_subject
from sie.values.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    Overloaded,
    PoisonInput,
    SieError,
    Unavailable,
    to_wire,
)
from tests.unit.cluster.fakes import FakeConnection

LANE, OTHER = Lane("p", "l4", "b"), Lane("p", "a100", "b")
ANSWER = answer_subject("gw", LANE.pool, "result")
FAR_NS = 60_000_000_000
NOBODY, MANY, FEW = Caller(), Caller("many"), Caller("few")


class Desk:
    """An `InFlight` on a fake connection."""

    def __init__(self, max_items: int = 100, window: int = 256) -> None:
        self.connection = FakeConnection()
        self.window = window
        self.items = InFlight(
            self.connection, "gw", max_items, window=lambda *_: self.window, together=lambda *_: 16  # type: ignore[arg-type]
        )  # fmt: skip
        self.joined: list[Sequence[Result]] = []

    def submit(self, *bodies: bytes, left_ns: int = FAR_NS, caller: Caller = NOBODY) -> RemotePending:
        deadline_ns = time.monotonic_ns() + left_ns
        pieces = [Piece(body, number) for number, body in enumerate(bodies)]
        return self.items.submit(LANE, "encode", "m", pieces, deadline_ns=deadline_ns, join=self.join, caller=caller)

    def join(self, results: Sequence[Result], submitted_ns: int) -> RemoteReply:
        self.joined.append(results)
        return RemoteReply(memoryview(b"".join(result.reply for result in results)), 0, submitted_ns)

    def stored(self) -> list[Work]:
        return [work for message in self.messages() for work in message]

    def messages(self) -> list[list[Work]]:
        stored = self.connection.stream.values()
        return [decode(data, works_decoder).items for subject, data, _ in stored if ".work." in subject]

    async def answer(self, number: int, item: int, text: bytes = b"x", error: SieError | None = None) -> None:
        wire = to_wire(error) if error is not None else None
        self.items.on_result(Result(VERSION, f"gw-{number}-{item}", "h", wire, memoryview(text)), ANSWER)
        await asyncio.sleep(0)


def run(test: Callable[[Desk], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a desk on an event loop."""

    async def body() -> None:
        async with asyncio.timeout(60):
            await test(Desk())

    asyncio.run(body())


async def turns() -> None:
    """Let the tasks that were started do what they can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_items_of_a_request_are_joined_in_order_however_they_are_answered():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a", b"b", b"c")
        await turns()
        assert [bytes(work.body) for work in desk.stored()] == [b"a", b"b", b"c"]
        for item in (2, 0, 1):
            await desk.answer(1, item, b"abc"[item : item + 1])
        assert bytes((await pending.reply()).view) == b"abc"
        await turns()
        assert (desk.items.num_items, desk.items.num_pending) == (0, 0)

    run(test)


def test_a_second_answer_to_an_item_is_dropped():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a", b"b")
        await desk.answer(1, 0, b"first")
        await desk.answer(1, 0, b"second")
        assert not pending.future.done()
        await desk.answer(1, 1, b"!")
        assert bytes((await pending.reply()).view) == b"first!"

    run(test)


def test_a_late_answer_changes_nothing():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a", left_ns=1)
        desk.items.expire(time.monotonic_ns() + 10)
        with pytest.raises(DeadlineExceeded):
            await pending.reply()
        await desk.answer(1, 0)
        assert not desk.joined
        assert desk.items.num_items == 0

    run(test)


def test_the_first_item_that_failed_gives_the_error_under_its_own_number():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a", b"b", b"c")
        await desk.answer(1, 2, error=BadRequest("bad - at `$.items[0].text`"))
        assert not pending.future.done(), "an item before it may fail, too"
        await desk.answer(1, 0)
        await desk.answer(1, 1, error=BadRequest("worse - at `$.items[0].text`"))
        with pytest.raises(BadRequest, match=r"worse - at `\$\.items\[1\]\.text`"):
            await pending.reply()

    run(test)


def test_after_a_reconnect_only_unanswered_items_are_published_again_and_as_new_messages():
    async def test(desk: Desk) -> None:
        desk.submit(b"a", b"b")
        await turns()
        await desk.answer(1, 0)
        desk.connection.stream.clear()  # a restarted server
        await desk.items.publish_again()
        ((_, _, message_id),) = desk.connection.stream.values()
        assert [bytes(work.body) for work in desk.stored()] == [b"b"]
        assert message_id == "gw-2"

    run(test)


def test_a_request_while_nats_is_away_is_published_when_it_is_back():
    async def test(desk: Desk) -> None:
        desk.connection.is_connected = False
        pending = desk.submit(b"a")
        await turns()
        assert not desk.connection.stream
        assert not pending.future.done()
        desk.connection.is_connected = True
        await desk.items.publish_again()
        await turns()
        assert len(desk.connection.stream) == 1

    run(test)


def test_an_item_over_a_mebibyte_goes_by_reference_and_its_payload_is_deleted_when_it_is_answered():
    async def test(desk: Desk) -> None:
        body = bytes(INLINE_BYTES + 1)
        pending = desk.submit(body)
        await turns()
        (work,) = desk.stored()
        assert (bytes(work.body), desk.connection.objects[work.stored]) == (b"", body)
        await desk.answer(1, 0)
        await pending.reply()
        await turns()
        assert not desk.connection.objects

    run(test)


def test_a_result_by_reference_that_is_gone_is_asked_for_again():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a")
        await turns()
        desk.items.on_result(Result(VERSION, "gw-1-0", "h", stored="gone"), ANSWER)
        await turns()
        assert not pending.future.done()
        assert len(desk.stored()) == 2
        desk.connection.objects["there"] = b"whole"
        desk.items.on_result(Result(VERSION, "gw-1-0", "h", stored="there"), ANSWER)
        assert bytes((await pending.reply()).view) == b"whole"
        assert not desk.connection.objects

    run(test)


def test_a_full_stream_refuses_the_request_and_leaves_nothing_behind():
    async def test(desk: Desk) -> None:
        desk.connection.refuses = Overloaded("full", retry_after_s=1)
        pending = desk.submit(b"a", b"b")
        with pytest.raises(Overloaded):
            await pending.reply()
        assert (desk.items.num_items, desk.items.num_pending, dict(desk.items.by_lane)) == (0, 0, {LANE: 0})

    run(test)


def test_a_gateway_refuses_over_max_in_flight_but_takes_one_large_request():
    async def test(_: Desk) -> None:
        desk = Desk(max_items=2)
        desk.submit(b"a", b"b", b"c")
        with pytest.raises(Overloaded, match="max_in_flight"):
            desk.submit(b"d")

    run(test)


def test_what_a_client_no_longer_waits_for_leaves_the_stream_unless_a_host_runs_it():
    async def test(desk: Desk) -> None:
        pending = []
        for body in (b"a", b"b"):
            pending.append(desk.submit(body))
            await turns()
        desk.items.on_taken(Taken(VERSION, "h", ["gw-1-0"]), ANSWER)
        for one in pending:
            desk.items.abandon(one, DeadlineExceeded("over"))
        await turns()
        assert [bytes(work.body) for work in desk.stored()] == [b"a"]

    run(test)


def test_an_item_that_three_hosts_died_with_is_refused_and_kept_as_a_dead_letter():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a")
        await turns()
        for host in ("h1", "h2", "h3"):
            assert not pending.future.done()
            desk.items.on_taken(Taken(VERSION, host, ["gw-1-0"]), ANSWER)
            desk.items.on_silent({host})
            desk.items.on_silent({host})  # it stays silent: that is one loss
            await turns()
        with pytest.raises(PoisonInput):
            await pending.reply()
        await turns()
        assert [subject for subject, _, _ in desk.connection.stream.values()] == [dead_subject(LANE, "m")]

    run(test)


def test_the_dead_letter_of_a_large_item_has_its_whole_body():
    async def test(desk: Desk) -> None:
        body = bytes(range(256)) * 10_000
        desk.submit(body)
        await turns()
        for host in ("h1", "h2", "h3"):
            desk.items.on_taken(Taken(VERSION, host, ["gw-1-0"]), ANSWER)
            desk.items.on_silent({host})
        await turns()
        messages = [data for subject, data, _ in desk.connection.stream.values() if subject == dead_subject(LANE, "m")]
        assert all(len(data) <= INLINE_BYTES for data in messages)
        letters = [msgspec.msgpack.decode(data, type=DeadLetter) for data in messages]
        assert b"".join(letter.work.body for letter in letters) == body
        assert [(letter.part, letter.num_parts) for letter in letters] == [
            (n, len(letters)) for n in range(len(letters))
        ]
        assert {letter.work.stored for letter in letters} == {""}, "the gateway deletes what it had stored"

    run(test)


def test_a_host_that_was_only_unreachable_convicts_nobody():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a")
        await turns()
        for host in ("h1", "h2", "h3", "h4"):
            desk.items.on_taken(Taken(VERSION, host, ["gw-1-0"]), ANSWER)
            desk.items.on_silent({host})
            desk.items.on_returned(host)
        await turns()
        assert not pending.future.done()

    run(test)


def test_items_of_a_lane_without_hosts_move_to_another():
    async def test(desk: Desk) -> None:
        desk.submit(b"a")
        await turns()
        ((key, items),) = desk.items.waiting(lambda *_: False).items()
        assert key == (LANE, "m", Placement(LANE.pool, ""))
        desk.items.move(items, OTHER)
        await turns()
        assert [subject for subject, _, _ in desk.connection.stream.values()] == [work_subject(OTHER, "m")]

    run(test)


def test_a_refused_client_is_told_to_come_back_when_what_waits_will_be_answered(monkeypatch: pytest.MonkeyPatch):
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    async def test() -> None:
        nonlocal now_s
        desk = Desk()

        async def refused() -> int | None:
            desk.connection.refuses = Overloaded("full", retry_after_s=1)
            with pytest.raises(Overloaded) as caught:
                await desk.submit(b"x").reply()
            desk.connection.refuses = None
            return caught.value.retry_after_s

        assert await refused() == 5  # nothing was answered yet
        await turns()
        desk.submit(*[b"a"] * 40)
        await turns()
        for item in range(4):
            now_s += 0.01
            await desk.answer(2, item)
        told = await refused()  # 4 answers in the first second, and 37 items wait
        assert told is not None
        assert 7 <= told <= 10

    asyncio.run(test())


def test_what_is_over_the_window_waits_here_and_leaves_by_turns_of_keys():
    async def test(_: Desk) -> None:
        desk = Desk(window=2)
        desk.submit(*[b"m"] * 6, caller=MANY)
        await turns()
        desk.submit(b"f", b"f", caller=FEW)
        await turns()
        assert len(desk.stored()) == 2
        for request, item in ((1, 0), (1, 1), (2, 0), (1, 2)):
            await desk.answer(request, item)
            await turns()
        assert b"".join(bytes(work.body) for work in desk.stored()) == b"mmfmfm"
        told = [desk.items.take_backlog() for _ in range(2)]
        assert told == [{work_subject(LANE, "m"): 2}, {work_subject(LANE, "m"): 1}], "the most since it was told"
        desk.window = 10
        desk.items.pump()
        await turns()
        assert len(desk.stored()) == 8

    run(test)


def test_waiting_items_are_published_once_after_a_reconnect_move_with_their_lane_and_end_with_their_request():
    async def test(_: Desk) -> None:
        desk = Desk(window=1)
        pending = desk.submit(b"a", b"b", b"c")
        await turns()
        await desk.items.publish_again()
        assert [bytes(work.body) for work in desk.stored()] == [b"a", b"a"]
        desk.items.move([pending.items[1]], OTHER)
        await turns()
        assert [bytes(work.body) for work in desk.stored()] == [b"a", b"a", b"b"]
        desk.items.abandon(pending, DeadlineExceeded("over"))
        await turns()
        assert (desk.items.num_items, desk.items.num_pending) == (0, 0)
        desk.submit(b"d")
        await turns()
        assert [bytes(work.body) for work in desk.stored()][-1] == b"d", "the window is free again"

    run(test)


def test_a_full_gateway_refuses_the_newest_of_the_key_that_holds_most_and_never_more_than_needed():
    async def test(_: Desk) -> None:
        desk = Desk(max_items=4, window=1)
        flood = [desk.submit(b"m", caller=MANY) for _ in range(4)]
        with pytest.raises(Overloaded, match="max_in_flight"):
            desk.submit(b"m", caller=MANY)
        few = desk.submit(b"f", caller=FEW)
        assert [pending.future.done() for pending in flood] == [False, False, False, True]
        with pytest.raises(Overloaded) as caught:
            await flood[-1].reply()
        assert caught.value.retry_after_s
        desk.submit(b"f", caller=FEW)
        with pytest.raises(Overloaded):
            desk.submit(b"f", caller=FEW)
        assert (desk.items.num_items, few.future.done()) == (4, False)

    run(test)


def test_a_request_that_would_wait_for_most_of_its_time_is_refused_with_the_time_until_its_turn(
    monkeypatch: pytest.MonkeyPatch,
):
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    async def test() -> None:
        nonlocal now_s
        desk = Desk(window=2)
        desk.submit(*[b"m"] * 60, caller=MANY)
        for item in range(20):  # ten a second
            now_s += 0.1
            await desk.answer(1, item)
        with pytest.raises(Overloaded) as caught:
            desk.submit(b"m", left_ns=6_000_000_000, caller=MANY)
        assert caught.value.retry_after_s in (4, 5)
        desk.submit(b"m", left_ns=20_000_000_000, caller=MANY)
        desk.submit(b"f", left_ns=6_000_000_000, caller=FEW)

    asyncio.run(test())


def test_an_outage_says_nothing_about_what_hosts_can_do(monkeypatch: pytest.MonkeyPatch):
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    async def test() -> None:
        nonlocal now_s
        desk = Desk(max_items=1000, window=2)
        desk.submit(*[b"m"] * 200)
        for item in range(30):  # ten a second
            now_s += 0.1
            await desk.answer(1, item)
        desk.connection.is_connected = False
        desk.items.pump()
        now_s += 60.0
        desk.connection.is_connected = True
        desk.items.pump()
        now_s += 0.1
        await desk.answer(1, 30)
        desk.submit(b"m", left_ns=45_000_000_000)
        await desk.items.publish_again()
        for item in range(31, 34):  # what comes while NATS recovers comes slowly
            now_s += 0.9
            await desk.answer(1, item)
        desk.submit(b"m", left_ns=1_000_000_000)
        now_s += 5.0
        desk.items.pump()
        desk.submit(b"m", left_ns=45_000_000_000)
        with pytest.raises(Overloaded):
            desk.submit(b"m", left_ns=25_000_000_000)

    asyncio.run(test())


def test_a_reply_by_reference_that_comes_after_its_request_ended_leaves_the_store():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a")
        await turns()
        desk.items.abandon(pending, DeadlineExceeded("too late"))
        await turns()
        desk.connection.objects = {"gw-1-0.h": b"large"}
        late = Result(VERSION, "gw-1-0", "h", stored="gw-1-0.h")
        desk.items.on_result(late, answer_subject("gw", "other", "result"))
        await turns()
        assert desk.connection.objects, "hosts of another pool have no say"
        desk.items.on_result(late, ANSWER)
        await turns()
        assert not desk.connection.objects

    run(test)


def test_a_request_that_ends_while_its_payload_is_stored_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    async def test(desk: Desk) -> None:
        keep, gate = desk.connection.keep, asyncio.Event()

        async def keep_slowly(pool: str, name: str, data: Any) -> str:
            await gate.wait()
            return await keep(pool, name, data)

        monkeypatch.setattr(desk.connection, "keep", keep_slowly)
        pending = desk.submit(bytes(INLINE_BYTES + 1))
        await turns()
        desk.items.abandon(pending, DeadlineExceeded("too late"))
        await turns()
        gate.set()
        await turns()
        assert (desk.connection.objects, desk.stored()) == ({}, [])

    run(test)


def test_work_that_is_published_again_has_its_deadline_on_the_clock_of_then():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a")
        await turns()
        now_ns, hour_ns = time.monotonic_ns(), 3_600_000_000_000
        desk.connection.clock.measure(now_ns, now_ns, now_ns + hour_ns)  # another server leads the stream
        await desk.items.publish_again()
        before, after = (work.deadline_ns for work in desk.stored())
        assert (before, after) == (pending.deadline_ns, pending.deadline_ns + hour_ns)

    run(test)


def test_a_host_that_gave_an_item_back_has_no_part_in_its_later_losses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sie.cluster.gateway.in_flight._RETURN_S", 0.0)

    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a")
        for host in ("h1", "h2", "h3"):
            await turns()
            desk.items.on_taken(Taken(VERSION, host, ["gw-1-0"]), ANSWER)
            desk.items.on_result(Result(VERSION, "gw-1-0", host, is_returned=True), ANSWER)
            await turns()
            desk.items.on_silent({host})
        await turns()
        assert not pending.future.done()

    run(test)


def test_hosts_of_another_pool_cannot_answer():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a")
        await turns()
        foreign = answer_subject("gw", "other", "result")
        desk.items.on_taken(Taken(VERSION, "bad", ["gw-1-0"]), foreign)
        desk.items.on_result(Result(VERSION, "gw-1-0", "bad", reply=memoryview(b"forged")), foreign)
        assert (pending.future.done(), pending.items[0].taken_by) == (False, "")
        await desk.answer(1, 0, b"true")
        assert bytes((await pending.reply()).view) == b"true"

    run(test)


def test_a_message_whose_confirmation_was_lost_is_stored_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sie.cluster.gateway.in_flight._RETRY_S", 0)

    async def test(desk: Desk) -> None:
        desk.connection.refuses = Unavailable("no confirmation")
        desk.submit(b"a")
        await turns()
        desk.connection.refuses = None
        await turns()
        await desk.items.publish_again()
        assert [message_id for _, _, message_id in desk.connection.stream.values()] == ["gw-1", "gw-2"]

    run(test)


def test_short_items_of_one_turn_are_one_message_and_a_long_one_is_alone():
    async def test(desk: Desk) -> None:
        for body in (b"a", b"b", b"x" * 5000, b"c"):
            desk.submit(body)
        await turns()
        assert [len(message) for message in desk.messages()] == [2, 1, 1]
        desk.submit(*[b"d"] * 17)
        await turns()
        assert [len(message) for message in desk.messages()[3:]] == [16, 1]

    run(test)


def test_items_that_were_lost_together_twice_are_tried_one_by_one_so_that_one_convicts_no_other():
    async def test(desk: Desk) -> None:
        pending = [desk.submit(body) for body in (b"bad", b"good", b"last")]
        await turns()
        for host in ("h1", "h2", "h3"):  # each takes all that there is
            desk.items.on_taken(Taken(VERSION, host, [work.id for work in desk.stored()]), ANSWER)
            desk.items.on_silent({host})
            await turns()
        with pytest.raises(PoisonInput):
            await pending[0].reply()
        assert [bytes(work.body) for work in desk.stored()] == [b"good"]
        await desk.items.publish_again()
        assert {bytes(work.body) for work in desk.stored()} == {b"good"}
        await desk.answer(2, 0, b"fine")
        await turns()
        assert b"last" in {bytes(work.body) for work in desk.stored()}
        await desk.answer(3, 0, b"fine, too")
        assert [bytes((await one.reply()).view) for one in pending[1:]] == [b"fine", b"fine, too"]

    run(test)


def test_a_fault_with_the_results_of_a_request_ends_that_request():
    async def test(desk: Desk) -> None:
        def join(*_: object) -> RemoteReply:
            raise KeyError("fault")

        desk.join, rightly = join, desk.join  # type: ignore[method-assign]
        bad = desk.submit(b"a")
        desk.join = rightly  # type: ignore[method-assign]
        good = desk.submit(b"b")
        await turns()
        await desk.answer(1, 0)
        await desk.answer(2, 0, b"fine")
        assert isinstance(bad.future.exception(), Internal)
        assert bytes((await good.reply()).view) == b"fine"

    run(test)


def test_a_request_that_ends_while_it_is_published_leaves_nothing_in_the_stream():
    async def test(desk: Desk) -> None:
        enqueue, gate = desk.connection.enqueue, asyncio.Event()

        async def slow(*message: Any) -> int:
            await gate.wait()
            return await enqueue(*message)

        desk.connection.enqueue = slow  # type: ignore[method-assign]
        pending = desk.submit(b"a", b"b")
        await turns()
        desk.items.abandon(pending, DeadlineExceeded("x"))
        await turns()
        gate.set()
        await turns()
        assert not desk.messages()

    run(test)


def test_an_item_that_a_host_gave_back_is_published_again_until_it_is_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sie.cluster.gateway.in_flight._RETURN_S", 0)

    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a", b"b")
        await turns()
        desk.items.on_result(Result(VERSION, "gw-1-1", "h", to_wire(Overloaded("full")), is_returned=True), ANSWER)
        await turns()
        assert [[bytes(work.body) for work in message] for message in desk.messages()] == [[b"a", b"b"], [b"b"]]
        await desk.answer(1, 0, b"A")
        await desk.answer(1, 1, b"B")
        assert bytes((await pending.reply()).view) == b"AB"

    run(test)


def test_an_answered_request_is_freed_without_the_garbage_collector():
    async def test(desk: Desk) -> None:
        pending = desk.submit(b"a", b"b")
        gone = weakref.ref(pending)
        await turns()
        await desk.answer(1, 0)
        await desk.answer(1, 1)
        await turns()
        desk.joined.clear()
        del pending
        assert gone() is None

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()
