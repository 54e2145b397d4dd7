"""What the engine does with the requests of a late worker: another worker gets them, too, and the first answer counts."""

from __future__ import annotations

import time

from sie.frontend.engine.worker_link import ShmPending
from sie.ipc.messages import Quarantine
from sie.shm.extent import is_cancelled
from sie.shm.layout import FLAG_ALONE
from sie.values.errors import BadRequest, ClientGone, PoisonInput, Unavailable
from tests.unit.engine_rig import Rig, Worker, checksum, in_rig


def tell(rig: Rig, worker: Worker, running: tuple[int, ...] = (), *, is_late: bool = True) -> None:
    """Let the engine hear that a worker is late, or no longer, and tick."""
    rig.engine.set_late(worker.slot, worker.generation, running, is_late=is_late)
    rig.engine.expire(time.monotonic_ns())


def pair_of_workers(rig: Rig) -> tuple[Worker, Worker, ShmPending]:
    """Start two workers, and submit a request to the first."""
    late, other = rig.start_worker("m"), rig.start_worker("m")
    pending = rig.submit([1, 2])
    assert pending.link is not None
    assert pending.link.slot == late.slot
    return late, other, pending


@in_rig()
async def test_request_of_a_late_worker_is_answered_by_another_and_both_leases_stay(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    tell(rig, late)
    await rig.serve(other)

    assert await rig.rows(pending) == [checksum([1, 2])]
    assert rig.engine.num_extents == rig.engine.num_pending == 1, "the late worker may still read its extent"
    assert is_cancelled(pending.lease.view)
    await rig.serve(late)
    assert late.ran == []


@in_rig()
async def test_late_worker_that_answers_first_counts_and_the_other_does_not_run(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    tell(rig, late)
    await rig.serve(late)

    assert await rig.rows(pending) == [checksum([1, 2])]
    await rig.serve(other)
    assert other.ran == []


@in_rig()
async def test_second_answer_is_given_back(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    tell(rig, late)
    late.turn(4)
    other.turn(4)
    await rig.settle()

    assert await rig.rows(pending) == [checksum([1, 2])]
    assert late.ran == other.ran == [[[1, 2]]]


@in_rig()
async def test_request_is_copied_once_and_only_to_a_worker_that_is_not_late(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    tell(rig, other)
    tell(rig, late)
    assert rig.engine.num_extents == 1
    tell(rig, other, is_late=False)
    for _ in range(3):
        rig.engine.expire(time.monotonic_ns())
    assert rig.engine.num_extents == rig.engine.num_pending == 2
    tell(rig, other)
    assert rig.engine.num_extents == 2

    await rig.serve(other)
    assert await rig.rows(pending) == [checksum([1, 2])]
    await rig.serve(late)


@in_rig()
async def test_new_work_avoids_a_late_worker_until_it_is_late_no_more(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    tell(rig, late)
    requests = [rig.submit([n]) for n in range(1, 5)]
    assert all(request.link is not None and request.link.slot == other.slot for request in requests)
    await rig.serve(other)
    await rig.serve(late)
    tell(rig, late, is_late=False)
    again = rig.submit([9])
    assert again.link is not None
    assert again.link.slot == late.slot
    await rig.serve(late)
    for n, request in enumerate((*requests, again), 1):
        assert await rig.rows(request) == [checksum([n if n < 5 else 9])]
    assert await rig.rows(pending) == [checksum([1, 2])]


@in_rig()
async def test_copies_of_a_late_step_run_alone_and_others_together(rig: Rig) -> None:
    """An input that hangs its step must not take the step's other inputs along a second time."""
    late, other = rig.start_worker("m"), rig.start_worker("m")
    rig.engine.set_late(other.slot, other.generation, (), is_late=True)
    requests = [rig.submit([n]) for n in range(1, 5)]
    tell(rig, other, is_late=False)
    tell(rig, late, (requests[0].request_id, requests[1].request_id))
    await rig.serve(other)

    assert sorted(map(sorted, other.ran)) == [[[1]], [[2]], [[3], [4]]]
    for n, request in enumerate(requests, 1):
        assert await rig.rows(request) == [checksum([n])]
    await rig.serve(late)


@in_rig()
async def test_death_of_either_worker_leaves_the_request_to_the_other(rig: Rig) -> None:
    for is_late_dead in (True, False):
        late, other, pending = pair_of_workers(rig)
        tell(rig, late)
        dead, live = (late, other) if is_late_dead else (other, late)
        rig.die(dead)
        assert rig.engine.num_extents == rig.engine.num_pending == 1
        await rig.serve(live)
        assert await rig.rows(pending) == [checksum([1, 2])]
        assert dead.ran == []
        rig.die(live)


@in_rig()
async def test_death_of_both_workers_leaves_the_request_to_a_successor(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    tell(rig, late)
    rig.die(other)
    rig.die(late)
    assert rig.engine.num_extents == rig.engine.num_pending == 1
    successor = rig.start_worker("m", slot=0)
    await rig.serve(successor)
    assert await rig.rows(pending) == [checksum([1, 2])]


@in_rig()
async def test_input_that_hangs_two_workers_is_refused_and_holds_no_third(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    third = rig.start_worker("m")
    tell(rig, late, (pending.request_id,))
    copy = pending.rival
    assert copy is not None
    assert copy.flags & FLAG_ALONE
    rig.die(late, suspects=(pending.request_id,))
    tell(rig, other, (copy.request_id,))
    assert rig.engine.num_extents == 1
    assert rig.sent == []
    rig.die(other, suspects=(copy.request_id,))
    assert [type(message) for message in rig.sent] == [Quarantine]
    rig.engine.quarantine(rig.sent[0].digest)

    assert isinstance(await rig.error(pending), PoisonInput)
    assert third.ran == []


@in_rig()
async def test_client_that_leaves_cancels_both(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    tell(rig, late)
    rig.engine.abandon(pending, ClientGone("left"))
    await rig.settle()
    await rig.serve(other)
    await rig.serve(late)

    assert isinstance(await rig.error(pending), ClientGone)
    assert late.ran == other.ran == []


@in_rig()
async def test_retryable_error_of_one_is_no_answer_while_the_other_has_it(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    other.runners["m"].raises[1] = Unavailable("not now")
    tell(rig, late)
    await rig.serve(other)
    assert not pending.future.done()
    tell(rig, late, is_late=False)
    await rig.serve(late)
    assert await rig.rows(pending) == [checksum([1, 2])]


@in_rig()
async def test_other_error_of_one_is_the_answer(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    other.runners["m"].raises[1] = BadRequest("no")
    tell(rig, late)
    await rig.serve(other)
    assert isinstance(await rig.error(pending), BadRequest)
    await rig.serve(late)
    assert late.ran == []


@in_rig()
async def test_without_memory_for_a_copy_the_request_waits_for_some(rig: Rig) -> None:
    late, other, pending = pair_of_workers(rig)
    hogs = list(iter(lambda: rig.space.lease(64), None))
    tell(rig, late)
    assert rig.engine.num_pending == 1
    for hog in hogs:
        hog.end()
    rig.engine.expire(time.monotonic_ns())
    await rig.serve(other)
    assert await rig.rows(pending) == [checksum([1, 2])]
    await rig.serve(late)


@in_rig()
async def test_word_of_another_generation_changes_nothing(rig: Rig) -> None:
    late, _, pending = pair_of_workers(rig)
    rig.engine.set_late(late.slot, late.generation + 7, (), is_late=True)
    rig.engine.expire(time.monotonic_ns())
    assert rig.engine.num_extents == 1
    await rig.serve(late)
    assert await rig.rows(pending) == [checksum([1, 2])]
