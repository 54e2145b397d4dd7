"""Work items at a host: order of result and acknowledgement, expired and duplicated deliveries, clocks that differ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
import pytest

from sie.cluster.connection import INLINE_BYTES
from sie.cluster.host import work_pull
from sie.cluster.host.item_run import Answer
from sie.cluster.host.pull_metrics import PullMetrics
from sie.cluster.host.work_pull import WorkPull
from sie.cluster.payloads import VERSION, DeadLetter, Result, Work, Works, decode, encode, results_decoder
from sie.cluster.request_forms import score_item
from sie.cluster.subjects import Lane
from sie.config.cluster_settings import Cluster
from sie.config.settings import Settings
from sie.shm.pages import CounterPage
from sie.values.errors import BadRequest, Overloaded, PoisonInput, Unavailable, from_wire
from sie.values.inference import ScoreRequest
from tests.unit.cluster.fakes import FakeConnection

REPLY_TO, ACK = "sie.v1.gateway.gw.result", "$JS.ACK.one"
HOUR_NS = 3_600_000_000_000
BODY = memoryview(score_item(ScoreRequest(model="m", query="q", documents=["a"])))


class Bench:
    """A puller whose operations a test answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, skew_ns: int = 0) -> None:
        process = SimpleNamespace(
            settings=Settings(cluster=Cluster(max_pulled=4)), models=SimpleNamespace(entries={}, workers=()),
            engine=SimpleNamespace(queued_tokens=0, queued_on=lambda _slots: 0), check_accepting=lambda: None,
        )  # fmt: skip
        self.connection = FakeConnection(skew_ns)
        self.page = CounterPage.create(1 << 14)
        metrics = PullMetrics(self.page, {"m"})
        self.pull = WorkPull(process, self.connection, Lane("p", "any", "any"), "h1", metrics)  # type: ignore[arg-type]
        self.gate = asyncio.Event()
        self.gate.set()
        self.outcome: Answer | Exception = Answer(memoryview(b"reply"), 3, 0, 1, 2, {})
        self.deadlines_ns: list[int] = []
        monkeypatch.setattr(work_pull, "run_item", self.run_item)

    async def run_item(self, _process: Any, _model: str, _request: Any, deadline_ns: int) -> Answer:
        self.deadlines_ns.append(deadline_ns)
        await self.gate.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def deliver(
        self, left_ns: int = HOUR_NS, *, version: int = VERSION, names: tuple[str, ...] = ("gw-1-0",), stored: str = ""
    ) -> None:
        deadline_ns = self.connection.clock.to_server(time.monotonic_ns() + left_ns)
        body = memoryview(b"") if stored else BODY
        works = [Work(VERSION, name, REPLY_TO, deadline_ns, "score", "m", body, stored) for name in names]
        data = encode(Works(version, works))
        await self.pull._take(SimpleNamespace(data=data, reply=ACK, headers=None))  # type: ignore[arg-type]

    async def sent(self, count: int) -> list[tuple[str, bytes]]:
        """Return what was published, once there is this much."""
        while len(self.connection.published) < count:  # noqa: ASYNC110  # it is a list of a fake
            await asyncio.sleep(0)
        return self.connection.published


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[Bench], Coroutine[Any, Any, None]], skew_ns: int = 0) -> None:
    async def body() -> None:
        async with asyncio.timeout(60):
            await test(Bench(monkeypatch, skew_ns))

    asyncio.run(body())


def result_of(data: bytes) -> Result:
    (result,) = decode(data, results_decoder).items
    return result


def test_items_are_counted_by_their_outcome(monkeypatch):
    async def test(bench: Bench) -> None:
        await bench.deliver()
        await bench.sent(2)
        await bench.deliver(left_ns=-1, names=("gw-2-0",))
        bench.outcome = Overloaded("full")
        await bench.deliver(names=("gw-3-0",))
        await bench.sent(5)
        counted = {one.labels[1][1]: one.value for one in bench.page.records() if one.name == "sie_worker_items_total"}
        assert counted == {"answered": 1, "expired": 1, "returned": 1}

    run(monkeypatch, test)


def test_an_item_is_acknowledged_after_its_result_was_published(monkeypatch):
    async def test(bench: Bench) -> None:
        await bench.deliver()
        (subject, data), acknowledgement = await bench.sent(2)
        assert subject == REPLY_TO
        assert (bytes(result_of(data).reply), result_of(data).host) == (b"reply", "h1")
        assert acknowledgement == (ACK, b"+ACK")

    run(monkeypatch, test)


def test_expired_work_goes_back_to_its_gateway_and_is_not_run(monkeypatch):
    async def test(bench: Bench) -> None:
        await bench.deliver(left_ns=-1)
        (reply_to, data), acknowledged = await bench.sent(2)
        assert (reply_to, result_of(data).is_returned, acknowledged) == (REPLY_TO, True, (ACK, b"+ACK"))
        assert not bench.deadlines_ns

    run(monkeypatch, test)


@pytest.mark.parametrize("skew_ns", [-HOUR_NS, HOUR_NS])
def test_a_deadline_holds_though_the_clocks_differ_by_an_hour(monkeypatch, skew_ns):
    async def test(bench: Bench) -> None:
        before_ns = time.monotonic_ns()
        await bench.deliver(left_ns=5_000_000_000)
        await bench.sent(2)
        assert before_ns <= bench.deadlines_ns[0] - 5_000_000_000 <= time.monotonic_ns()

    run(monkeypatch, test, skew_ns)


def test_an_item_that_is_delivered_again_while_it_runs_runs_once(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.gate.clear()
        await bench.deliver()
        await bench.deliver()
        assert bench.pull.num_running == 1
        bench.gate.set()
        assert [subject for subject, _ in await bench.sent(3)] == [REPLY_TO, ACK, ACK]
        assert len(bench.deadlines_ns) == 1

    run(monkeypatch, test)


def test_an_item_that_is_delivered_again_after_its_answer_is_answered_again(monkeypatch):
    async def test(bench: Bench) -> None:
        await bench.deliver()
        await bench.sent(2)
        await bench.deliver()  # the acknowledgement was lost
        sent = await bench.sent(4)
        assert result_of(sent[0][1]) == result_of(sent[2][1])

    run(monkeypatch, test)


def test_another_version_is_refused_and_not_delivered_again(monkeypatch):
    async def test(bench: Bench) -> None:
        await bench.deliver(version=VERSION + 1)
        assert await bench.sent(1) == [(ACK, b"+TERM")]

    run(monkeypatch, test)


def test_a_client_hears_the_error_of_its_own_item(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.outcome = BadRequest("no")
        await bench.deliver()
        (_, data), _ = await bench.sent(2)
        error = result_of(data).error
        assert error is not None
        assert from_wire(error).message == "no"

    run(monkeypatch, test)


def test_an_item_that_this_host_has_no_room_for_goes_back_to_its_gateway(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.outcome = Overloaded("full")
        await bench.deliver()
        (_, data), acknowledgement = await bench.sent(2)
        assert result_of(data).is_returned
        assert acknowledgement == (ACK, b"+ACK")

    run(monkeypatch, test)


def test_a_model_is_pulled_for_by_the_room_of_its_own_workers(monkeypatch):
    async def test(bench: Bench) -> None:
        process, pulled = bench.pull._process, dict[str, int]()
        entries = {
            model: SimpleNamespace(state="loaded", workers=(slot,), card=SimpleNamespace(kind="encoder"))
            for slot, model in enumerate(("full", "idle"))
        }
        workers = [SimpleNamespace(slot=slot, state="ready", device=f"cuda:{slot}") for slot in range(2)]
        process.models = SimpleNamespace(entries=entries, workers=workers)  # type: ignore[assignment]
        process.engine.queued_on = lambda slots: 1 << 30 if 0 in slots else 0  # type: ignore[attr-defined]

        def consumer(model: str) -> Any:
            async def pull(room: int) -> None:
                pulled[model] = room

            return SimpleNamespace(pull=pull)

        bench.pull._consumers = {model: consumer(model) for model in entries}
        await bench.pull._pull()
        assert pulled.keys() == {"idle"}

    run(monkeypatch, test)


@pytest.mark.parametrize("error", [nats.errors.TimeoutError(), nats.js.errors.BadRequestError(description="too many")])
def test_a_model_whose_consumer_cannot_be_made_stops_neither_the_others_nor_what_runs(monkeypatch, caplog, error):
    async def test(bench: Bench) -> None:
        entry = SimpleNamespace(state="loaded", workers=(0,), card=SimpleNamespace(kind="encoder"))
        entries = dict.fromkeys(("bad", "good"), entry)
        bench.pull._process.models = SimpleNamespace(entries=entries, workers=())  # type: ignore[assignment]
        made: list[str] = []

        async def make_consumer(_pool: str, config: Any) -> None:
            made.append(config.durable_name)
            if "bad" in config.durable_name:
                raise error

        async def subscribe(*_: Any) -> None:
            pass

        monkeypatch.setattr(bench.connection, "make_consumer", make_consumer, raising=False)
        monkeypatch.setattr(bench.connection, "subscribe", subscribe, raising=False)
        for _ in range(5):
            await bench.pull.tick()
        assert sorted(made) == ["any~any~bad", "any~any~good"]
        assert len(caplog.records) == 1

    run(monkeypatch, test)


def test_an_input_that_kills_workers_becomes_a_dead_letter_and_its_client_hears_why(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.outcome = PoisonInput("it killed two workers")
        await bench.deliver()
        (_, data), _ = await bench.sent(2)
        error = result_of(data).error
        assert error is not None
        assert error.code == "POISON_INPUT"
        ((subject, _, _),) = bench.connection.stream.values()
        assert ".dead." in subject

    run(monkeypatch, test)


def test_the_dead_letter_of_an_item_by_reference_has_its_whole_body_before_its_gateway_deletes_it(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.outcome = PoisonInput("it killed two workers")
        body = score_item(ScoreRequest(model="m", query="q" * 2_000_000, documents=["a"]))
        bench.connection.objects["gw-1-0"] = body
        publish = bench.connection.publish

        async def forget(subject: str, data: bytes, reply: str = "") -> None:
            bench.connection.objects.clear()
            await publish(subject, data, reply)

        monkeypatch.setattr(bench.connection, "publish", forget)
        await bench.deliver(stored="gw-1-0")
        await bench.sent(2)
        letters = [msgspec.msgpack.decode(data, type=DeadLetter) for _, data, _ in bench.connection.stream.values()]
        assert b"".join(letter.work.body for letter in letters) == body
        assert {(letter.num_parts, letter.work.stored, letter.hosts[0]) for letter in letters} == {
            (len(letters), "", "h1")
        }

    run(monkeypatch, test)


def test_a_reply_over_a_mebibyte_goes_by_reference(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.outcome = Answer(memoryview(bytes(INLINE_BYTES + 1)), 3, 0, 1, 2, {})
        await bench.deliver()
        (_, data), _ = await bench.sent(2)
        assert len(bench.connection.objects[result_of(data).stored]) == INLINE_BYTES + 1
        assert len(data) < 1000

    run(monkeypatch, test)


def test_a_reply_waits_for_room_in_the_store_and_does_not_run_again(monkeypatch):
    monkeypatch.setattr(work_pull, "_KEEP_AGAIN_S", 0.0)

    async def test(bench: Bench) -> None:
        keep, refused = bench.connection.keep, [Overloaded("full"), Unavailable("no leader")]

        async def keep_later(pool: str, name: str, data: Any) -> str:
            if refused:
                raise refused.pop()
            return await keep(pool, name, data)

        monkeypatch.setattr(bench.connection, "keep", keep_later)
        bench.outcome = Answer(memoryview(bytes(INLINE_BYTES + 1)), 3, 0, 1, 2, {})
        await bench.deliver()
        (_, data), _ = await bench.sent(2)
        result = result_of(data)
        assert (result.is_returned, list(bench.connection.objects)) == (False, [result.stored])
        assert len(bench.deadlines_ns) == 1

    run(monkeypatch, test)


def test_a_host_that_stops_gives_new_items_back_and_finishes_what_runs(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.gate.clear()
        await bench.deliver()
        draining = asyncio.create_task(bench.pull.drain(time.monotonic() + 60))
        while not bench.pull.is_stopping:  # noqa: ASYNC110  # it is a flag
            await asyncio.sleep(0)
        await bench.deliver(names=("gw-2-0",))
        bench.gate.set()
        await draining
        sent = [data for subject, data in bench.connection.published if subject == ACK]
        assert sent[0].startswith(b"-NAK")
        assert sent[-1] == b"+ACK"

    run(monkeypatch, test)


def test_a_message_of_several_items_is_acknowledged_after_all_their_results(monkeypatch):
    async def test(bench: Bench) -> None:
        names = ("gw-1-0", "gw-2-0", "gw-3-0")
        await bench.deliver(names=names)
        (subject, data), acknowledgement = await bench.sent(2)
        assert [result.id for result in decode(data, results_decoder).items] == list(names)
        assert (subject, acknowledgement) == (REPLY_TO, (ACK, b"+ACK"))

    run(monkeypatch, test)


def test_results_over_a_message_of_nats_are_several_messages(monkeypatch):
    async def test(bench: Bench) -> None:
        bench.outcome = Answer(memoryview(bytes(INLINE_BYTES // 2)), 3, 0, 1, 2, {})
        await bench.deliver(names=("gw-1-0", "gw-2-0", "gw-3-0"))
        sent = await bench.sent(4)
        assert [len(data) < 1 << 20 for _, data in sent] == [True] * 4
        assert [subject for subject, _ in sent] == [REPLY_TO] * 3 + [ACK]

    run(monkeypatch, test)


@pytest.mark.parametrize("is_poison", [False, True])
def test_an_item_that_waits_only_for_a_worker_is_answered_from_its_callback(monkeypatch, is_poison: bool):
    async def test(bench: Bench) -> None:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        started = SimpleNamespace(pending=SimpleNamespace(future=future))
        monkeypatch.setattr(work_pull, "try_start", lambda *_: started)
        monkeypatch.setattr(work_pull, "read_answer", lambda *_: bench.outcome)
        await bench.deliver()
        assert bench.pull.num_running == 1
        future.set_exception(PoisonInput("it killed two workers")) if is_poison else future.set_result(None)
        (_, data), acknowledgement = await bench.sent(2)
        error = result_of(data).error
        assert (error.code if error is not None else bytes(result_of(data).reply)) == (
            "POISON_INPUT" if is_poison else b"reply"
        )
        assert (acknowledgement, len(bench.connection.stream)) == ((ACK, b"+ACK"), int(is_poison))
        assert bench.pull.num_running == 0

    run(monkeypatch, test)
