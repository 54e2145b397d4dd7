from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path

import sie.frontend
from sie.ipc.messages import PeerFault
from sie.shm.layout import RELEASE
from tests.unit.engine_rig import Rig, Worker, checksum, in_rig


def released(worker: Worker) -> list[int]:
    """Let a worker read its ring once; return the kinds of descriptors it found, all releases."""
    (link,) = worker.loop._links.values()
    descriptors = link.attachment.drain()
    for descriptor in descriptors:
        link.release([descriptor.offset])
    return [descriptor.kind for descriptor in descriptors]


@in_rig()
async def test_replies_go_back_with_the_next_request(rig: Rig) -> None:
    worker = rig.start_worker("m")
    requests = [rig.submit([i]) for i in range(1, 4)]
    await rig.serve(worker)
    for pending in requests:
        pending.future.result().release()
    await asyncio.sleep(0)
    assert announced(worker) == 0, "they do not wake the worker"
    another = rig.submit([4])
    for _ in range(4):
        await asyncio.sleep(0)

    assert announced(worker) == 4
    await rig.serve(worker)
    assert await rig.rows(another) == [checksum([4])]


@in_rig()
async def test_many_replies_and_large_ones_go_back_at_once(rig: Rig) -> None:
    worker = rig.start_worker("m", "wide")
    many, wide = [rig.submit([i]) for i in range(1, 9)], rig.submit([1], model="wide")
    await rig.serve(worker)
    for replies, count in ((many, 8), ([wide], 1)):
        for pending in replies:
            pending.future.result().release()
        await asyncio.sleep(0)
        assert announced(worker) == count
        assert released(worker) == [RELEASE] * count


@in_rig()
async def test_replies_released_in_one_turn_go_back_together(rig: Rig) -> None:
    worker = rig.start_worker("m")
    requests = [rig.submit([i]) for i in range(1, 4)]
    await rig.serve(worker)
    replies = [pending.future.result() for pending in requests]
    for reply in replies:
        reply.release()
    assert released(worker) == [], "not before the process's tick"
    await rig.settle()

    assert released(worker) == [RELEASE] * 3


def announced(worker: Worker) -> int:
    """Return how many descriptors a worker was told of and has not read."""
    (link,) = worker.loop._links.values()
    bell_fd = link.attachment._consumer.bell_fd
    try:
        count = os.eventfd_read(bell_fd)
    except BlockingIOError:
        return 0
    os.eventfd_write(bell_fd, count)
    return count


@in_rig()
async def test_requests_of_one_turn_are_announced_together_when_it_ends(rig: Rig) -> None:
    worker = rig.start_worker("m")
    requests = [rig.submit([i]) for i in range(1, 3)]
    assert announced(worker) == 0, "not before the turn ends"
    await rig.settle()

    assert announced(worker) == 2
    await rig.serve(worker)
    assert [await rig.rows(pending) for pending in requests] == [[checksum([1])], [checksum([2])]]


@in_rig()
async def test_a_turn_of_many_requests_lets_the_worker_begin_meanwhile(rig: Rig) -> None:
    worker = rig.start_worker("m")
    requests = [rig.submit([i]) for i in range(1, 11)]
    assert announced(worker) == 8
    await rig.settle()

    assert announced(worker) == 10
    await rig.serve(worker)
    assert [await rig.rows(pending) for pending in requests] == [[checksum([i])] for i in range(1, 11)]


@in_rig()
async def test_a_bell_that_its_worker_filled_up_is_the_worker_s_fault(rig: Rig) -> None:
    """The request was taken by then; it runs on the worker that follows."""
    worker = rig.start_worker("m")
    (link,) = worker.loop._links.values()
    os.eventfd_write(link.attachment._consumer.bell_fd, 2**64 - 2)
    pending = rig.submit([1])
    await rig.settle()
    assert rig.sent == [PeerFault(worker.slot)]
    rig.die(worker)
    successor = rig.start_worker("m", slot=worker.slot)
    rig.engine.place_held()
    await rig.serve(successor)

    assert await rig.rows(pending) == [checksum([1])]


@in_rig()
async def test_replies_of_one_step_are_announced_together(rig: Rig) -> None:
    worker = rig.start_worker("m")
    requests = [rig.submit([i]) for i in range(1, 4)]
    (link,) = worker.loop._links.values()
    publish, counts = link.attachment.publish, list[int]()
    link.attachment.publish = lambda: (counts.append(link.attachment._producer._num_staged), publish())[1]
    await rig.serve(worker)

    assert counts == [3]
    assert [await rig.rows(pending) for pending in requests] == [[checksum([i])] for i in range(1, 4)]


@in_rig(ring_capacity=8)
async def test_more_releases_than_the_ring_takes_follow_by_themselves(rig: Rig) -> None:
    """Else a worker could wait for room that nobody knows to give back."""
    worker = rig.start_worker("m")
    replies = []
    for _ in range(4):
        requests = [rig.submit([i]) for i in range(1, 5)]
        await rig.serve(worker)
        replies += [pending.future.result() for pending in requests]
    for reply in replies:
        reply.release()
    await rig.settle()
    (link,) = worker.loop._links.values()
    for _ in range(4):
        worker.turn()
        await rig.settle()

    assert link.num_leased == 0


@in_rig()
async def test_release_after_the_worker_s_death_does_nothing(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending, other = rig.submit([1]), rig.submit([2])
    await rig.serve(worker)
    pending.future.result().release()
    rig.die(worker)
    other.future.result().release()
    await rig.settle()


@in_rig()
async def test_outstanding_tokens_follow_submits_and_answers(rig: Rig) -> None:
    worker = rig.start_worker("m")
    first, second = rig.submit([1] * 5), rig.submit([2] * 3)
    assert first.link is not None
    assert first.link.outstanding_tokens == 8
    await rig.serve(worker)
    assert first.link.outstanding_tokens == 0
    for pending in (first, second):
        await rig.rows(pending)


def test_no_reply_is_awaited_but_by_the_method_that_releases_it_when_its_caller_is_cancelled() -> None:
    """The future of a `Pending` drops its result when its awaiter is cancelled in the turn in which it came."""
    folder = Path(sie.frontend.__file__).parent
    bare = [str(path) for path in folder.rglob("*.py") if re.search(r"await [\w.]*pending\.future", path.read_text())]
    assert not bare


@in_rig()
async def test_a_worker_whose_answers_take_longer_is_sent_less(rig: Rig) -> None:
    slow, fast = rig.start_worker("m"), rig.start_worker("m")
    first, second = rig.submit([1]), rig.submit([1])
    first.sent_ns -= 10**12
    await rig.serve(slow)
    await rig.serve(fast)
    assert [first.link.slot, second.link.slot] == [slow.slot, fast.slot]
    rig.engine.expire(time.monotonic_ns())

    requests = [rig.submit([1]) for _ in range(6)]
    slots = [pending.link.slot for pending in requests]
    assert slots == [slow.slot, *[fast.slot] * 4, slow.slot], "four times as many go to the fast one"
    await rig.serve(slow)
    await rig.serve(fast)
    for pending in (first, second, *requests):
        assert await rig.rows(pending) == [checksum([1])]
