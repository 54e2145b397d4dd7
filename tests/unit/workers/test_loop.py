"""The step loop, attached to a real engine; see `tests/unit/engine_rig.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from sie.ipc import messages
from sie.ipc.messages import PeerFault
from sie.metrics import definitions
from sie.native import team
from sie.shm.attach import PendingAttachment
from sie.shm.attach_messages import Retire, send
from sie.shm.layout import REPLY
from sie.values.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    Overloaded,
    ResourceExhausted,
    Unavailable,
    WorkerLost,
)
from sie.workers import steps
from sie.workers.scheduling.waiting import Budget
from tests.unit.engine_rig import DEADLINE_S, MIB, Rig, SumRunner, Worker, card, checksum, in_rig, no_memory

TWO_ITEMS = Budget(max_tokens=1000, max_items=2, max_age_ns=10**12)
WIDTH = 65536


# --- steps -------------------------------------------------------------------------------------------------------------


@in_rig()
async def test_failing_request_does_not_fail_its_neighbours(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.runners["m"].raises = {8: BadRequest("token 8 is out of range"), 9: RuntimeError("secret detail")}
    good, bad, broken, last = rig.submit([1], [2]), rig.submit([8]), rig.submit([3], [9]), rig.submit([4])
    await rig.serve(worker)

    assert await rig.rows(good) == [checksum([1]), checksum([2])]
    assert await rig.rows(last) == [checksum([4])]
    assert str(await rig.error(bad)) == "token 8 is out of range"
    error = await rig.error(broken)
    assert isinstance(error, Internal)
    assert "secret" not in str(error)


@in_rig(budget=TWO_ITEMS)
async def test_row_that_ran_again_after_a_neighbour_s_failure_counts_once(rig: Rig) -> None:
    """The neighbour's values cannot be answered, which is found after the runner has returned all rows."""
    worker = rig.start_worker("m")
    long = rig.submit([1], [2] * 6, [3] * 8)
    overflow = rig.submit([70000, 70000], output_dtype="float16")
    await rig.serve(worker)

    assert worker.ran[0] == [[1], [70000, 70000]], "both were in one step, the good one first"
    assert await rig.rows(long) == [checksum([1]), checksum([2] * 6), checksum([3] * 8)]
    assert isinstance(await rig.error(overflow), Internal)


@in_rig()
async def test_one_step_answers_each_request_in_its_own_form(rig: Rig) -> None:
    worker = rig.start_worker("m")
    plain = rig.submit([3, 4])
    unit = rig.submit([3, 4], normalize=True)
    cut = rig.submit([3, 4], truncate_dim=2)
    half = rig.submit([3, 4], output_dtype="float16")
    bits = rig.submit([3, 4], output_dtype="binary")
    await rig.serve(worker)

    row = np.array(checksum([3, 4]))
    assert await rig.rows(plain) == [row.tolist()]
    assert np.allclose(await rig.rows(unit), [row / np.linalg.norm(row)])
    assert await rig.rows(cut) == [row[:2].tolist()]
    assert await rig.rows(half) == [row.tolist()]
    assert await rig.rows(bits) == [[0b11110000]]
    assert len(worker.ran) == 1


@in_rig()
async def test_one_step_answers_several_items_of_each_request_in_its_own_form(rig: Rig) -> None:
    worker = rig.start_worker("m")
    plain = rig.submit([3, 4], [5], [6])
    half = rig.submit([7], [8, 9], output_dtype="float16")
    cut = rig.submit([1], [2], truncate_dim=2)
    more = rig.submit([2, 2], [1, 1])
    await rig.serve(worker)

    assert await rig.rows(plain) == [checksum([3, 4]), checksum([5]), checksum([6])]
    assert await rig.rows(half) == [checksum([7]), checksum([8, 9])]
    assert await rig.rows(cut) == [checksum([1])[:2], checksum([2])[:2]]
    assert await rig.rows(more) == [checksum([2, 2]), checksum([1, 1])]
    assert len(worker.ran) == 1


@in_rig(budget=TWO_ITEMS)
async def test_request_of_more_items_than_a_step_is_answered_whole_beside_others(rig: Rig) -> None:
    worker = rig.start_worker("m")
    many = [[token] * length for token, length in enumerate((9, 1, 5, 1, 1, 7, 2), 1)]
    first, last = rig.submit(*many), rig.submit([8], [9, 9])
    await rig.serve(worker)

    assert await rig.rows(first) == [checksum(ids) for ids in many]
    assert await rig.rows(last) == [checksum([8]), checksum([9, 9])]
    assert sorted(ids for step in worker.ran for ids in step) == sorted([*many, [8], [9, 9]]), "each ran once"
    assert all(len(step) <= 2 for step in worker.ran)


@in_rig()
async def test_in_flight_page_names_what_runs_only_while_it_runs(rig: Rig) -> None:
    worker = rig.start_worker("m")
    seen = []
    worker.runners["m"].on_step = lambda: seen.append(worker.page.read())
    requests = [rig.submit([1], [2]), rig.submit([3])]
    await rig.serve(worker)

    (during,) = seen
    assert during.phase == "step"
    assert sorted(entry.request_id for entry in during.entries) == [pending.request_id for pending in requests]
    assert during.allowed_ns >= 10**8
    assert during.started_ns <= time.monotonic_ns()
    after = worker.page.read()
    assert (after.phase, after.entries) == ("idle", [])
    for pending in requests:
        await rig.rows(pending)


class Clock:
    """The clock of the steps, in place of the module `time`."""

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def monotonic_ns(self) -> int:
        return self.now_ns


@contextlib.contextmanager
def stopped_clock() -> Iterator[Clock]:
    """Let steps take the time that a test says: on a busy machine, a step of no work may stand still for a second."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "time", clock)
        yield clock


@in_rig()
async def test_quick_steps_of_one_model_do_not_shorten_another_s_allowance(rig: Rig) -> None:
    worker = rig.start_worker("m", "n")
    allowed: dict[str, int] = {}
    for name, runner in worker.runners.items():
        runner.on_step = lambda name=name: allowed.update({name: worker.page.read().allowed_ns})
    with stopped_clock():
        for _ in range(40):
            pending = rig.submit([1, 2], model="m")
            await rig.serve(worker)
            await rig.rows(pending)
        pending = rig.submit([1, 2], model="n")
        await rig.serve(worker)
        await rig.rows(pending)

    assert allowed["n"] == 250_000_000 + 10 * 2 * 2_000_000  # as of a model of which nothing is known
    assert allowed["m"] < allowed["n"]


@in_rig()
async def test_what_lent_cores_save_is_not_learned_as_this_worker_s_pace(rig: Rig) -> None:
    """A step that had help allows the next one, which may have none, the time of its own cores alone."""
    worker = rig.start_worker("m")
    allowed: list[int] = []
    saved_ns = iter(range(0, 1 << 62, 10**10))
    worker.runners["m"].on_step = lambda: allowed.append(worker.page.read().allowed_ns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "saved_ns", lambda: next(saved_ns))
        for _ in range(2):
            pending = rig.submit([1, 2])
            await rig.serve(worker)
            await rig.rows(pending)

    assert allowed[1] > 10 * 10**10
    assert worker.loop._state.max_tokens["m"] == 1


def queue_depth(worker: Worker, model: str) -> float:
    name, labels = definitions.QUEUE_DEPTH.name, definitions.QUEUE_DEPTH.label_pairs(model)
    return sum(record.value for record in worker.counters.records() if (record.name, record.labels) == (name, labels))


@in_rig(budget=TWO_ITEMS)
async def test_queue_depth_follows_what_comes_and_what_is_given_up(rig: Rig) -> None:
    worker = rig.start_worker("m", "n")
    first, *late = [rig.submit([1], [2]) for _ in range(3)]
    other = rig.submit([3], model="n")

    def let_deadlines_pass() -> None:
        """While the first request runs, those of the others pass."""
        for item in worker.loop._state.queues["m"]:
            item.deadline_ns = 0

    worker.runners["m"].on_step = let_deadlines_pass
    worker.turn()
    assert (queue_depth(worker, "m"), queue_depth(worker, "n")) == (4, 1)
    worker.turn(3)
    assert (queue_depth(worker, "m"), queue_depth(worker, "n")) == (0, 0), "nothing of it ran"
    await rig.rows(first)
    await rig.rows(other)
    for pending in late:
        assert isinstance(await rig.error(pending), DeadlineExceeded)


@in_rig(budget=TWO_ITEMS)
async def test_queue_depth_counts_each_item_of_a_request(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1], [2], [3], [4], [5])
    depths = []
    for _ in range(3):
        worker.turn()
        depths.append(queue_depth(worker, "m"))
    assert depths == [3, 1, 0]
    assert len(await rig.rows(pending)) == 5


@in_rig(budget=TWO_ITEMS)
async def test_models_share_the_time_and_not_the_tokens(rig: Rig) -> None:
    worker = rig.start_worker("m", "n")
    requests = [rig.submit([i], model=model) for model in "mn" for i in range(1, 7)]
    order: list[str] = []

    def run(name: str, takes_ns: int) -> None:
        order.append(name)
        clock.now_ns += takes_ns

    worker.runners["m"].on_step = lambda: run("m", 2_000_000)
    worker.runners["n"].on_step = lambda: run("n", 200_000_000)
    with stopped_clock() as clock:
        worker.turn(8)
    await rig.settle()

    assert order == ["m", "n", "m", "m", "n", "n"]
    for pending in requests:
        await rig.rows(pending)


# --- frontends come and go -----------------------------------------------------------------------------------------------


@in_rig()
async def test_work_of_a_frontend_that_was_replaced_never_runs(rig: Rig) -> None:
    worker = rig.start_worker("m")
    generation = worker.generation
    pending = rig.submit([1])
    worker.poll()  # taken from the ring, not yet run
    successor = Rig()
    successor._num_generations = 7
    successor.tell("m", workers=(0,))
    successor.attach(worker, frontend=0)
    theirs = successor.submit([2])
    await successor.serve(worker)

    assert await successor.rows(theirs) == [checksum([2])]
    assert worker.ran == [[[2]]]
    successor.close()
    rig.engine.fail_over(0, generation, ())
    rig.engine.abandon(pending, Overloaded("the test is over"))
    assert isinstance(await rig.error(pending), Overloaded)


@in_rig()
async def test_dead_frontend_s_work_and_memory_are_dropped(rig: Rig) -> None:
    worker = rig.start_worker("m", attach=False)
    process = await asyncio.create_subprocess_exec("sleep", "60")
    rig.attach(worker, frontend_pid=process.pid)
    pending = rig.submit([1])
    worker.poll()
    process.kill()
    await process.wait()
    worker.turn_until(lambda: not worker.loop._links)
    worker.turn()

    assert worker.ran == []
    rig.die(worker, recovering=())
    rig.engine.fail_held()
    assert isinstance(await rig.error(pending), WorkerLost)


@in_rig(max_large_bytes=4 * MIB, large_extent_bytes=65536)
async def test_large_reply_for_a_frontend_that_has_gone_harms_nobody(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    gone = Rig(max_large_bytes=4 * MIB, large_extent_bytes=65536)
    gone.tell("wide", workers=(0,))
    gone.attach(worker, frontend=1)
    gone.submit([1], model="wide")
    worker.poll()
    gone.engine._links[0].attachment._sock.close()
    mine = rig.submit([2], model="wide")
    await rig.serve(worker)

    assert await rig.rows(mine) == [checksum([2], WIDTH)]
    for link in list(worker.loop._links.values()):
        if link.slot == 1:
            worker.loop._detach(link)
    gone.space.close()


@pytest.mark.parametrize("deed", ["kind", "release", "doorbell", "socket", "retire"])
def test_frontend_that_breaks_the_protocol_is_reported_and_dropped(deed: str) -> None:
    @in_rig()
    async def run(rig: Rig) -> None:
        worker = rig.start_worker("m")
        worker.heard()
        attachment = rig.engine._links[0].attachment
        match deed:
            case "kind":
                assert attachment.push(REPLY, 0, 1, 0, 64)
            case "release":
                attachment.push_release([64])
            case "doorbell":
                os.eventfd_write(attachment._producer.fds[1], 1000)
            case "socket":
                attachment._sock.send(b"junk")
            case "retire":
                send(attachment._sock, Retire(3), [])
        worker.turn(2)

        assert worker.heard() == [PeerFault(0)]
        assert worker.loop._links == {}

    run()


@in_rig()
async def test_frontend_that_does_not_attach_leaves_the_others_served(rig: Rig) -> None:
    worker = rig.start_worker("m")
    reading, writing = os.pipe()
    pidfd = os.pidfd_open(os.getpid())
    worker.supervisor.send(messages.Attach(5, 99), [reading, pidfd])
    for fd in (reading, writing, pidfd):
        os.close(fd)
    pending = rig.submit([1])
    await rig.serve(worker)

    assert await rig.rows(pending) == [checksum([1])]


def introduce(worker: Worker, slot: int = 0, generation: int = 1, pidfd: int | None = None) -> socket.socket:
    """Tell a worker of a frontend that has made no offer yet; return the frontend's end. pidfd: of its process, not ours."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.pidfd_open(os.getpid())
    worker.supervisor.send(messages.Attach(slot, generation), [theirs.fileno(), own if pidfd is None else pidfd])
    theirs.close()
    os.close(own)
    ours.setblocking(False)
    return ours


def is_awaited(frontend: socket.socket) -> bool:
    """Tell whether a worker still waits for the offer of an introduced frontend."""
    try:
        return frontend.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True


@contextlib.contextmanager
def frontend_process() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a process to kill, and its pidfd, which stays open as the supervisor's does."""
    process = subprocess.Popen(["sleep", "600"])
    pidfd = os.pidfd_open(process.pid)
    try:
        yield process, pidfd
    finally:
        process.kill()
        process.wait()
        os.close(pidfd)


@in_rig()
async def test_successor_of_a_frontend_that_died_before_its_offer_is_awaited(rig: Rig) -> None:
    """The supervisor keeps the dead one's pidfd open, so closing the worker's does not end its events."""
    worker = rig.start_worker("m", attach=False)
    with frontend_process() as (process, pidfd):
        first = introduce(worker, 0, 1, pidfd)
        worker.turn()
        first.close()
        process.kill()
        process.wait()
        worker.turn()
        successor = introduce(worker, 0, 2)
        worker.turn(3)
        assert is_awaited(successor)
    successor.close()


@in_rig()
async def test_frontends_that_are_replaced_during_one_step_are_awaited(rig: Rig) -> None:
    """Their predecessors' deaths are events of the same turn, and their descriptors have the predecessors' numbers."""
    worker = rig.start_worker("m", attach=False)
    with frontend_process() as (first, first_fd), frontend_process() as (second, second_fd):
        before = [introduce(worker, 0, 1, first_fd), introduce(worker, 1, 2, second_fd)]
        worker.turn(2)
        worker.supervisor.send(messages.Configure(rig.settings))  # so that control messages are the turn's first event
        for process in (first, second):
            process.kill()
            process.wait()
        successors = [introduce(worker, 0, 3), introduce(worker, 1, 4)]
        worker.turn()
        assert [is_awaited(successor) for successor in successors] == [True, True]
    for sock in (*before, *successors):
        sock.close()


@in_rig(max_large_bytes=4 * MIB, large_extent_bytes=65536)
async def test_reply_for_which_the_host_has_no_memory_may_be_asked_for_again(rig: Rig) -> None:
    """Unlike one that is larger than the memory for replies."""
    worker = rig.start_worker("wide")
    pending = rig.submit([1], model="wide")
    with no_memory():
        worker.turn(4)
        await rig.settle()
    error = await rig.error(pending)
    assert isinstance(error, ResourceExhausted)
    assert error.retryable
    again = rig.submit([1], model="wide")
    await rig.serve(worker)
    assert len(await rig.rows(again)) == 1


@in_rig()
async def test_frontend_gets_no_offer_before_its_own(rig: Rig) -> None:
    """Until then it may hold the memory of the worker's predecessor."""
    worker = rig.start_worker(attach=False)
    sock = introduce(worker)
    worker.turn(3)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    pending = PendingAttachment(sock, os.pidfd_open(os.getpid()), 1, rig.space, rig.settings.memory.ring_capacity)
    worker.turn()
    attachment = pending.try_finish()
    assert attachment is not None
    attachment.close()


@in_rig()
async def test_frontend_for_which_there_is_no_memory_is_attached_when_there_is(rig: Rig) -> None:
    worker = rig.start_worker("m", attach=False)
    pending = PendingAttachment(
        introduce(worker), os.pidfd_open(os.getpid()), 1, rig.space, rig.settings.memory.ring_capacity
    )
    with no_memory() as refused:
        worker.turn(3)
        assert len(refused) == 1, "its offer stays readable, and is no reason to try again at once"
        worker.loop._periodic_ns = 0
        worker.turn()
        assert len(refused) == 2
    assert pending.try_finish() is None
    worker.loop._periodic_ns = 0
    worker.turn()
    attachment = pending.try_finish()
    assert attachment is not None
    rig.engine.attach(0, attachment)
    worker.frontends.append(attachment)
    mine = rig.submit([1])
    await rig.serve(worker)
    assert await rig.rows(mine) == [checksum([1])]


@in_rig()
async def test_message_that_is_not_for_a_worker_is_ignored_and_its_descriptors_closed(rig: Rig) -> None:
    worker = rig.start_worker("m")
    reading, writing = os.pipe()
    worker.supervisor.send(messages.Drain(), [writing])
    os.close(writing)
    worker.turn()

    assert os.read(reading, 1) == b"", "nobody has the other end any more"
    os.close(reading)


@in_rig()
async def test_loop_ends_when_the_supervisor_has_gone(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.supervisor.close()
    worker.loop.run()
    worker.is_dead = True


# --- models --------------------------------------------------------------------------------------------------------------


@in_rig()
async def test_load_runs_beside_the_steps(rig: Rig) -> None:
    worker = rig.start_worker("m")
    may_end = threading.Event()

    def build(model):
        assert may_end.wait(DEADLINE_S)
        return SumRunner(model)

    worker.build = build
    worker.supervisor.send(messages.Load(card("slow")))
    pending = rig.submit([1])
    await rig.serve(worker)
    assert await rig.rows(pending) == [checksum([1])]
    assert worker.states()[-1] == ("slow", "loading")
    may_end.set()
    worker.turn_until(lambda: worker.host.runner("slow"))

    assert worker.states()[-1] == ("slow", "loaded")


@in_rig()
async def test_request_for_a_model_that_still_loads_is_refused(rig: Rig) -> None:
    worker = rig.start_worker("m")
    rig.tell("absent", workers=(0,))
    pending = rig.submit([1], model="absent")
    await rig.serve(worker)

    error = await rig.error(pending)
    assert isinstance(error, Unavailable)
    assert error.code == "MODEL_NOT_LOADED"


@in_rig(budget=TWO_ITEMS)
async def test_unload_serves_what_is_queued_and_refuses_what_comes_later(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.heard()
    queued = [rig.submit([i]) for i in range(1, 7)]
    worker.turn()
    worker.supervisor.send(messages.Unload("m"))
    worker.turn()
    late = rig.submit([9])
    worker.turn(4)
    await rig.settle()

    for i, pending in enumerate(queued, 1):
        assert await rig.rows(pending) == [checksum([i])]
    assert (await rig.error(late)).code == "MODEL_NOT_LOADED"
    assert worker.states() == [("m", "unloading"), ("m", "available")]


@in_rig(budget=TWO_ITEMS)
async def test_unload_does_not_wait_for_other_models_to_be_idle(rig: Rig) -> None:
    worker = rig.start_worker("m", "n")
    worker.heard()
    busy = [rig.submit([i], model="n") for i in range(1, 9)]
    worker.supervisor.send(messages.Unload("m"))
    worker.turn(2)

    assert worker.states() == [("m", "unloading"), ("m", "available")]
    assert worker.loop._state, "the other model still has work"
    await rig.serve(worker)
    for pending in busy:
        await rig.rows(pending)


@in_rig(budget=TWO_ITEMS)
async def test_load_that_overtakes_an_unload_keeps_the_model_and_its_queue(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.heard()
    queued = [rig.submit([i]) for i in range(1, 6)]
    worker.turn()
    worker.supervisor.send(messages.Unload("m"))
    worker.supervisor.send(messages.Load(card("m")))
    worker.turn(4)
    await rig.settle()

    for i, pending in enumerate(queued, 1):
        assert await rig.rows(pending) == [checksum([i])]
    assert worker.states() == [("m", "unloading"), ("m", "loaded")]
    assert len(worker.runners) == 1


@in_rig(budget=TWO_ITEMS)
async def test_a_worker_needs_its_cores_until_nothing_waits(rig: Rig) -> None:
    worker, needs = rig.start_worker("m"), []
    worker.loop._set_needed = needs.append
    worker.turn()
    assert needs == [False, True], "it lends its cores while it waits for events"
    needs.clear()
    many = rig.submit([1], [2], [3], [4], [5], [6])
    worker.turn()
    assert needs == [False, True]
    assert len(worker.ran) == 1
    needs.clear()
    worker.turn(2)
    assert needs == [], "items wait for a step"
    assert len(worker.ran) == 3
    assert len(await rig.rows(many)) == 6
