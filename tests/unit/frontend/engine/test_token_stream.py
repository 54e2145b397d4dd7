"""How tokens come from a worker to their stream: order, restarts, deadlines, and what a worker may not say."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest

from sie.frontend.engine.token_stream import StreamTimes, TokenStream
from sie.frontend.engine.worker_link import ShmPending
from sie.ipc.messages import PeerFault
from sie.values.errors import ClientGone, DeadlineExceeded, Internal, Overloaded, PoisonInput, WorkerLost
from sie.values.generate import GenerateTask, Sampling, TokenRecord
from sie.values.work import WorkHeader
from tests.unit.engine_rig import Rig, in_rig

FAR_NS = 1 << 62
S = 10**9


class Heard:
    """A stream with how often its handler was woken."""

    def __init__(self, num_choices: int = 1, idle_s: float = 60, total_s: float = 3600) -> None:
        self.num_news = 0
        self.stream = TokenStream(num_choices, StreamTimes(int(idle_s * S), int(total_s * S)), self._on_news)

    def _on_news(self) -> None:
        self.num_news += 1


async def submit(
    rig: Rig, stream: TokenStream, prompt: list[int] | None = None, deadline_ns: int = FAR_NS, seed: int = 0
) -> ShmPending:
    ids = np.array(prompt or [1, 2, 3], np.int32)
    task = GenerateTask(8, sampling=Sampling(seed=seed), salt=b"%d" % seed)
    header = WorkHeader("m", "generate", 1, (), task=msgspec.msgpack.encode(task))
    arrays = [("cu_seqlens", np.array([0, len(ids)], np.int32)), ("token_ids", ids)]
    pending = await rig.engine.submit_stream(header, arrays, len(ids), deadline_ns, stream)
    await rig.settle()
    return pending


def record(pending: ShmPending, index: int, *ids: int, choice: int = 0, finish: str = "") -> TokenRecord:
    return TokenRecord(pending.request_id, choice, index, ids, finish)


@in_rig()
async def test_worker_gets_prompt_and_task_and_its_tokens_arrive_in_order(rig: Rig) -> None:
    worker, heard = rig.start_hand_worker(), Heard(num_choices=2)
    pending = await submit(rig, heard.stream)
    header, task, prompt = worker.task()
    assert (header.model, header.operation, task.max_tokens, prompt) == ("m", "generate", 8, [1, 2, 3])

    worker.tell(record(pending, 0, 5), record(pending, 0, 6, choice=1))
    worker.tell(record(pending, 1, 7, 8, finish="stop"))
    await rig.settle()
    taken = heard.stream.take()
    assert [(r.choice, r.token_ids) for r in taken] == [(0, (5,)), (1, (6,)), (0, (7, 8))]
    assert worker.num_released == 2
    assert not heard.stream.is_over

    worker.tell(record(pending, 1, choice=1, finish="length"))
    worker.reply(pending.request_id, num_generated=4)
    await rig.settle()
    assert [r.finish for r in heard.stream.take()] == ["length"]
    assert heard.stream.is_over
    assert heard.stream.totals is not None
    assert heard.stream.totals.num_generated == 4
    assert heard.num_news >= 4


@in_rig()
async def test_records_before_an_error_are_taken_first(rig: Rig) -> None:
    worker, heard = rig.start_hand_worker(), Heard()
    pending = await submit(rig, heard.stream)
    worker.tell(record(pending, 0, 5))
    worker.fail(pending.request_id, Internal("it broke"))
    await rig.settle()
    assert len(heard.stream.take()) == 1
    with pytest.raises(Internal, match="it broke"):
        heard.stream.take()


@in_rig()
async def test_stream_whose_client_has_nothing_begins_anew_on_another_worker(rig: Rig) -> None:
    first, heard = rig.start_hand_worker(), Heard()
    pending = await submit(rig, heard.stream)
    first.tell(record(pending, 0, 5, 6))
    await rig.settle()
    heard.stream.stop(0)
    assert first.stopped() == [0]
    rig.die(first)
    second = rig.start_hand_worker()
    await rig.settle()

    assert heard.stream.num_restarts == 1
    assert heard.stream.take() == []
    assert second.stopped() == []
    second.tell(record(pending, 0, 9, finish="stop"))
    second.reply(pending.request_id)
    await rig.settle()
    assert [r.token_ids for r in heard.stream.take()] == [(9,)]


@in_rig()
async def test_stream_whose_client_has_some_ends_with_worker_lost(rig: Rig) -> None:
    worker, heard = rig.start_hand_worker(), Heard()
    pending = await submit(rig, heard.stream)
    worker.tell(record(pending, 0, 5))
    await rig.settle()
    heard.stream.take()
    heard.stream.is_sent = True
    rig.die(worker)
    await rig.settle()
    with pytest.raises(WorkerLost):
        heard.stream.take()


@in_rig()
async def test_what_a_worker_said_before_it_died_is_taken(rig: Rig) -> None:
    worker, heard = rig.start_hand_worker(), Heard()
    pending = await submit(rig, heard.stream)
    worker.tell(record(pending, 0, 5))
    await rig.settle()
    heard.stream.is_sent = True
    heard.stream.take()
    worker.tell(record(pending, 1, 6))  # in the ring, and the event loop has not turned since
    rig.die(worker)
    assert [r.token_ids for r in heard.stream.take()] == [(6,)]
    await rig.settle()
    with pytest.raises(WorkerLost):
        heard.stream.take()


@in_rig()
async def test_deadline_is_that_of_the_first_token_and_then_of_the_next(rig: Rig) -> None:
    worker, late, idle, long = rig.start_hand_worker(), Heard(), Heard(idle_s=5), Heard(idle_s=50, total_s=20)
    now_ns = time.monotonic_ns()
    requests = [await submit(rig, heard.stream, deadline_ns=now_ns + 10 * S) for heard in (late, idle, long)]
    worker.tell(record(requests[1], 0, 5), record(requests[2], 0, 5))
    await rig.settle()
    assert idle.stream.take()
    assert long.stream.take()

    for after_s, heard, words in (
        (6, idle, "stream_idle_timeout_s"), (11, late, "first token"), (21, long, "generation_timeout_s")
    ):  # fmt: skip
        rig.engine.expire(time.monotonic_ns() + after_s * S)
        with pytest.raises(DeadlineExceeded, match=words):
            heard.stream.take()
    assert all(worker.is_cancelled(number) for number in range(3))
    for pending in requests:
        worker.drop(pending.request_id)


@in_rig()
async def test_abandoned_stream_cancels_its_work_and_drops_what_still_comes(rig: Rig) -> None:
    worker, heard = rig.start_hand_worker(), Heard()
    pending = await submit(rig, heard.stream)
    rig.engine.abandon(pending, ClientGone("left"))
    assert worker.is_cancelled()
    worker.tell(record(pending, 0, 5))
    worker.drop(pending.request_id)
    await rig.settle()
    with pytest.raises(ClientGone):
        heard.stream.take()


@in_rig()
async def test_streams_get_half_of_the_request_memory(rig: Rig) -> None:
    worker = rig.start_hand_worker()
    prompt = [1] * 50_000  # 200 kB of 1 MiB
    requests = [await submit(rig, Heard().stream, prompt) for _ in range(2)]
    with pytest.raises(Overloaded, match="half"):
        await submit(rig, Heard().stream, prompt)
    for pending in requests:
        worker.drop(pending.request_id)
    await rig.settle()
    worker.drop((await submit(rig, Heard().stream, prompt)).request_id)


@in_rig()
async def test_input_that_kills_workers_is_known_whatever_its_seed_and_sender(rig: Rig) -> None:
    worker = rig.start_hand_worker()
    one, two, other = [
        await submit(rig, Heard().stream, prompt, seed=seed) for prompt, seed in (([1, 2], 1), ([1, 2], 2), ([1, 3], 1))
    ]
    assert one.digest() == two.digest() != other.digest()
    rig.engine.quarantine(one.digest())
    with pytest.raises(PoisonInput):
        await submit(rig, Heard().stream, [1, 2], seed=3)
    for pending in (one, two, other):
        worker.drop(pending.request_id)


@pytest.mark.parametrize("case", ["gap", "repeat", "choice", "after its last", "stranger"])
def test_worker_that_sends_tokens_out_of_order_is_reported(case: str) -> None:
    @in_rig()
    async def check(rig: Rig) -> None:
        worker, heard = rig.start_hand_worker(), Heard()
        pending = await submit(rig, heard.stream)
        worker.tell(record(pending, 0, 5, 6, finish="stop" if case == "after its last" else ""))
        wrong = {
            "gap": record(pending, 3, 7), "repeat": record(pending, 1, 7), "choice": record(pending, 0, 7, choice=1),
            "after its last": record(pending, 2, 7), "stranger": TokenRecord(99, 0, 0, (1,)),
        }[case]  # fmt: skip
        worker.tell(wrong)
        await rig.settle()
        assert rig.sent == [PeerFault(worker.slot)]
        heard.stream.is_sent = True
        rig.die(worker)
        heard.stream.take()
        with pytest.raises(WorkerLost):
            heard.stream.take()

    check()
