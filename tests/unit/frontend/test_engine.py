from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from sie.control import PeerFault, Quarantine
from sie.errors import (
    ClientGone,
    DeadlineExceeded,
    Internal,
    NotFound,
    Overloaded,
    PoisonInput,
    Unavailable,
    WorkerLost,
)
from sie.shm.layout import ERROR, RELEASE, REPLY
from sie.types import WorkHeader
from sie.workers.scheduler import Budget
from tests.unit.engine_rig import MIB, Rig, Worker, checksum, in_rig


@in_rig()
async def test_request_is_answered_with_its_own_rows(rig: Rig) -> None:
    worker = rig.start_worker("m")
    first, second = rig.submit([1, 2, 3], [4]), rig.submit([5, 6])
    await rig.serve(worker)

    assert await rig.rows(second) == [checksum([5, 6])]
    assert await rig.rows(first) == [checksum([1, 2, 3]), checksum([4])]
    assert worker.ran == [[[1, 2, 3], [4], [5, 6]]]


@in_rig()
async def test_extent_stays_leased_until_the_answer_and_the_reply_until_its_release(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    assert (rig.engine.num_extents, rig.engine.num_pending, rig.engine.queued_tokens) == (1, 1, 1)
    await rig.serve(worker)
    assert (rig.engine.num_extents, rig.engine.num_pending, rig.engine.queued_tokens) == (0, 0, 0)

    reply = await pending.future
    (link,) = worker.loop._links.values()
    assert link.num_leased == 1
    reply.release()
    await rig.settle()
    worker.turn()
    assert link.num_leased == 0


@in_rig()
async def test_error_of_the_worker_reaches_its_request_with_all_it_says(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.runners["m"].raises[9] = NotFound("no such thing", code="GONE", extras={"where": "there"})
    pending = rig.submit([9])
    await rig.serve(worker)

    error = await rig.error(pending)
    assert isinstance(error, NotFound)
    assert (error.message, error.code, error.extras) == ("no such thing", "GONE", {"where": "there"})


@in_rig()
async def test_request_goes_to_the_worker_with_the_fewest_tokens_outstanding(rig: Rig) -> None:
    one, two = rig.start_worker("m"), rig.start_worker("m")
    requests = [rig.submit([1] * 10), rig.submit([2] * 3), rig.submit([3] * 3), rig.submit([4] * 3)]
    await rig.serve(one)
    await rig.serve(two)

    assert [len(step) for step in one.ran] == [1]
    assert [len(step) for step in two.ran] == [3]
    for pending in requests:
        await rig.rows(pending)


# --- giving up ---------------------------------------------------------------------------------------------------------


@in_rig()
async def test_request_cancelled_before_its_step_never_runs(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending, other = rig.submit([1]), rig.submit([2])
    rig.engine.abandon(pending, ClientGone("left"))

    assert isinstance(await rig.error(pending), ClientGone)
    assert rig.engine.num_extents == 2, "the worker may still read what was given up"
    await rig.serve(worker)
    assert worker.ran == [[[2]]]
    await rig.rows(other)


@in_rig()
async def test_reply_that_comes_after_the_client_gave_up_is_released(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    worker.turn()
    rig.engine.abandon(pending, ClientGone("left"))
    await rig.serve(worker)

    assert worker.ran == [[[1]]]
    assert isinstance(await rig.error(pending), ClientGone)


@in_rig()
async def test_request_past_its_deadline_is_answered_at_once_and_not_run(rig: Rig) -> None:
    worker = rig.start_worker("m")
    now_ns = time.monotonic_ns()
    late, early = rig.submit([1], deadline_ns=now_ns), rig.submit([2], deadline_ns=now_ns + 10**12)
    rig.engine.expire(now_ns)

    assert isinstance(await rig.error(late), DeadlineExceeded)
    assert not early.future.done()
    await rig.serve(worker)
    assert worker.ran == [[[2]]]
    await rig.rows(early)


@in_rig()
async def test_worker_that_finds_a_deadline_passed_first_is_a_deadline_error_too(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1], deadline_ns=1)
    await rig.serve(worker)

    assert isinstance(await rig.error(pending), DeadlineExceeded)
    assert worker.ran == []


@in_rig()
async def test_held_request_ends_at_its_deadline_and_gives_its_extent_back(rig: Rig) -> None:
    rig.tell("m", recovering=True)
    pending = rig.submit([1], deadline_ns=100)
    rig.engine.expire(99)
    assert not pending.future.done()
    rig.engine.expire(100)

    assert isinstance(await rig.error(pending), DeadlineExceeded)


# --- refusals ----------------------------------------------------------------------------------------------------------


@in_rig()
async def test_model_without_a_worker_that_is_not_recovering_is_unavailable(rig: Rig) -> None:
    rig.tell("m")
    for model in ("m", "unheard-of"):
        with pytest.raises(Unavailable) as caught:
            rig.submit([1], model=model)
        assert caught.value.code == "MODEL_NOT_LOADED"
    assert rig.engine.num_extents == 0


@in_rig(ring_capacity=8)
async def test_full_ring_is_overloaded_and_open_again_after_answers(rig: Rig) -> None:
    worker = rig.start_worker("m")
    taken = [rig.submit([i]) for i in range(1, 5)]
    with pytest.raises(Overloaded) as caught:
        rig.submit([9])
    assert 1 <= caught.value.retry_after_s <= 60
    assert rig.engine.num_extents == 4, "the refused request's extent is given back"

    await rig.serve(worker)
    for pending in taken:
        await rig.rows(pending)
    again = rig.submit([9])
    await rig.serve(worker)
    assert await rig.rows(again) == [checksum([9])]


@in_rig(ring_capacity=8)
async def test_request_goes_to_a_busier_worker_when_the_ring_of_the_idler_one_is_full(rig: Rig) -> None:
    one, two = rig.start_worker("m"), rig.start_worker("m")
    many_tokens = rig.submit([1] * 100)
    small = [rig.submit([2]) for _ in range(4)]
    last = rig.submit([3])
    await rig.serve(one)
    await rig.serve(two)

    assert [len(step) for step in one.ran + two.ran] == [2, 4]
    for pending in (many_tokens, *small, last):
        await rig.rows(pending)


@in_rig()
async def test_full_request_segment_is_overloaded(rig: Rig) -> None:
    rig.start_worker("m")
    with pytest.raises(Overloaded, match="request memory"):
        rig.submit(np.ones(MIB // 4 + 1, np.int32))
    assert rig.engine.num_extents == 0


@in_rig()
async def test_full_queue_is_overloaded_but_an_empty_one_takes_any_request(rig: Rig) -> None:
    worker = rig.start_worker("m")
    rig.engine._limits = type(rig.engine._limits)(max_queued_tokens=10)
    rig.engine.check_open()
    large = rig.submit([1] * 50)
    with pytest.raises(Overloaded, match="max_queued_tokens"):
        rig.submit([2])
    with pytest.raises(Overloaded):
        rig.engine.check_open()
    await rig.serve(worker)

    rig.engine.check_open()
    await rig.rows(large)


# --- death -------------------------------------------------------------------------------------------------------------


@in_rig()
async def test_work_of_a_dead_worker_runs_on_another_from_the_same_bytes(rig: Rig) -> None:
    dead, live = rig.start_worker("m"), rig.start_worker("m")
    requests = [rig.submit([i, i + 1]) for i in range(1, 9)]
    assert {pending.link.slot for pending in requests} == {0, 1}
    rig.die(dead)
    await rig.serve(live)

    for i, pending in enumerate(requests, 1):
        assert await rig.rows(pending) == [checksum([i, i + 1])]
    assert dead.ran == []


@in_rig()
async def test_replies_already_in_the_ring_of_a_dead_worker_are_answers(rig: Rig) -> None:
    dead, live = rig.start_worker("m"), rig.start_worker("m")
    answered = rig.submit([1])
    dead.turn(2)  # its reply is in the ring, and the event loop has not turned since
    rig.die(dead)
    await rig.serve(live)

    assert await rig.rows(answered) == [checksum([1])]
    assert live.ran == []


@in_rig()
async def test_rows_can_be_read_after_the_worker_that_wrote_them_died(rig: Rig) -> None:
    dead = rig.start_worker("m")
    pending = rig.submit([1])
    await rig.serve(dead)
    assert pending.future.done()
    rig.die(dead)

    assert await rig.rows(pending) == [checksum([1])]


@in_rig()
async def test_work_of_the_only_worker_waits_for_its_successor(rig: Rig) -> None:
    dead = rig.start_worker("m")
    before = rig.submit([1])
    rig.die(dead)
    meanwhile = rig.submit([2])
    assert rig.engine.num_pending == rig.engine.num_extents == 2

    successor = rig.start_worker("m", slot=0)
    await rig.serve(successor)
    assert await rig.rows(before) == [checksum([1])]
    assert await rig.rows(meanwhile) == [checksum([2])]


@in_rig()
async def test_request_given_up_before_its_worker_died_does_not_run_again(rig: Rig) -> None:
    dead, live = rig.start_worker("m"), rig.start_worker("m")
    pending = rig.submit([1])
    rig.engine.abandon(pending, ClientGone("left"))
    rig.die(dead)
    await rig.serve(live)

    assert isinstance(await rig.error(pending), ClientGone)
    assert live.ran == []


@in_rig()
async def test_model_that_does_not_come_back_fails_what_waits_for_it(rig: Rig) -> None:
    dead = rig.start_worker("m")
    pending = rig.submit([1])
    rig.die(dead)
    rig.engine.fail_held()
    assert not pending.future.done()
    rig.tell("m")
    rig.engine.fail_held()

    assert isinstance(await rig.error(pending), WorkerLost)


@in_rig(ring_capacity=8)
async def test_more_orphans_than_the_living_can_take_follow_when_there_is_room(rig: Rig) -> None:
    dead, live = rig.start_worker("m"), rig.start_worker("m")
    requests = [rig.submit([i]) for i in range(1, 9)]
    rig.die(dead)
    assert len(rig.engine._held) == 4
    await rig.serve(live)
    await rig.serve(live)

    for i, pending in enumerate(requests, 1):
        assert await rig.rows(pending) == [checksum([i])]


@in_rig()
async def test_word_of_an_older_generation_s_death_changes_nothing(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    rig.engine.bury(worker.slot, worker.generation - 1, ())
    await rig.serve(worker)

    assert await rig.rows(pending) == [checksum([1])]


@in_rig()
async def test_worker_whose_socket_closed_gets_no_more_work_but_its_replies_count(rig: Rig) -> None:
    closing = rig.start_worker("m")
    pending = rig.submit([1])
    closing.turn(2)
    for link in list(closing.loop._links.values()):
        closing.loop._detach(link)
    closing.is_dead = True
    await rig.settle()

    assert await rig.rows(pending) == [checksum([1])]
    waiting = rig.submit([2])
    assert waiting.link is None
    rig.die(closing)
    successor = rig.start_worker("m", slot=0)
    await rig.serve(successor)
    assert await rig.rows(waiting) == [checksum([2])]


@in_rig(max_large_bytes=8 * MIB, large_extent_bytes=65536)
async def test_large_request_for_a_worker_that_has_gone_waits_for_its_successor(rig: Rig) -> None:
    gone = rig.start_worker("m")
    for link in list(gone.loop._links.values()):
        gone.loop._detach(link)
    gone.is_dead = True
    ids = [1] * 20_000
    pending = rig.submit(ids)
    assert pending.link is None

    rig.die(gone)
    await rig.serve(rig.start_worker("m", slot=0))
    assert await rig.rows(pending) == [checksum(ids)]


# --- blame -------------------------------------------------------------------------------------------------------------


@in_rig()
async def test_suspects_run_alone_the_second_time(rig: Rig) -> None:
    dead = rig.start_worker("m")
    suspect, bystander, other = rig.submit([1], [2]), rig.submit([3]), rig.submit([4])
    rig.die(dead, suspects=(suspect.request_id, bystander.request_id))
    successor = rig.start_worker("m", slot=0)
    successor.turn(6)
    await rig.settle()

    assert sorted(successor.ran) == [[[1], [2]], [[3]], [[4]]]
    for pending in (suspect, bystander, other):
        await rig.rows(pending)
    assert rig.sent == []


@in_rig()
async def test_input_that_kills_twice_is_refused_and_quarantined_for_all(rig: Rig) -> None:
    dead = rig.start_worker("m")
    poison, same = rig.submit([6, 6, 6]), rig.submit([6, 6, 6])
    rig.die(dead, suspects=(poison.request_id, same.request_id))
    second = rig.start_worker("m", slot=0)
    rig.die(second, suspects=(poison.request_id,))

    assert isinstance(await rig.error(poison), PoisonInput)
    (message,) = rig.sent
    assert isinstance(message, Quarantine)
    rig.engine.quarantine(message.digest)
    assert isinstance(await rig.error(same), PoisonInput), "it waits with a strike and holds the same input"
    assert rig.engine.num_extents == 0


@in_rig()
async def test_quarantined_input_is_refused_and_every_other_is_served(rig: Rig) -> None:
    worker = rig.start_worker("m")
    probe = rig.submit([6, 6, 6])
    rig.engine.quarantine(probe.digest())

    with pytest.raises(PoisonInput):
        rig.submit([6, 6, 6])
    others = [rig.submit([6, 6]), rig.submit([6, 6, 7]), rig.submit([6, 6], [6]), rig.submit([6, 6, 6], normalize=True)]
    await rig.serve(worker)
    for pending in (probe, *others):
        await rig.rows(pending)


@in_rig()
async def test_digest_ignores_what_an_earlier_request_left_in_the_extent(rig: Rig) -> None:
    worker = rig.start_worker("m")
    digests = set()
    for noise in (1, 2, 3):
        filler = rig.submit([noise] * 40)
        await rig.serve(worker)
        await rig.rows(filler)
        pending = rig.submit([6] * 5)
        digests.add(pending.digest())
        await rig.serve(worker)
        await rig.rows(pending)

    assert len(digests) == 1


# --- a worker that breaks the protocol -----------------------------------------------------------------------------------


def _forge(worker: Worker, kind: int, request_id: int, length: int = 0) -> None:
    (link,) = worker.loop._links.values()
    assert link.attachment.push(kind, 0, request_id, 0, length)


@pytest.mark.parametrize(
    ("kind", "is_own_id", "length"),
    [(REPLY, False, 64), (ERROR, False, 0), (RELEASE, True, 64), (REPLY, True, 2 * MIB), (ERROR, True, 8)],
)
def test_worker_that_breaks_the_protocol_is_accused_and_its_work_goes_elsewhere(kind, is_own_id, length) -> None:
    @in_rig()
    async def run(rig: Rig) -> None:
        broken = rig.start_worker("m")
        pending = rig.submit([1])
        _forge(broken, kind, pending.request_id if is_own_id else 999, length)
        await rig.settle()

        assert rig.sent == [PeerFault(0)]
        assert not pending.future.done()
        rig.die(broken)
        await rig.serve(rig.start_worker("m", slot=0))
        assert await rig.rows(pending) == [checksum([1])]

    run()


@in_rig()
async def test_second_reply_to_one_request_is_a_fault(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    await rig.serve(worker)
    await rig.rows(pending)
    _forge(worker, ERROR, pending.request_id)
    await rig.settle()

    assert rig.sent == [PeerFault(0)]


@in_rig()
async def test_error_extent_of_junk_is_an_internal_error(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    (link,) = worker.loop._links.values()
    lease = link.lease(64)
    lease.view[:] = b"\xff" * 64
    assert link.attachment.push(ERROR, 0, pending.request_id, lease.address, 64)
    lease.hand_over(pending.request_id)
    await rig.settle()

    assert isinstance(await rig.error(pending), Internal)
    rig.die(worker)


@in_rig()
async def test_model_that_a_restart_took_away_is_waited_for(rig: Rig) -> None:
    """A request meets a worker that has lost the model which the supervisor is just restoring."""
    worker = rig.start_worker("m")
    del worker.host.models["m"]
    pending = rig.submit([1])
    rig.tell("m", recovering=True)
    await rig.serve(worker)
    assert not pending.future.done()

    worker.load("m")
    rig.tell("m", workers=(0,))
    rig.engine.place_held()
    await rig.serve(worker)
    assert await rig.rows(pending) == [checksum([1])]


@in_rig()
async def test_model_that_was_unloaded_is_an_error_of_its_name(rig: Rig) -> None:
    worker = rig.start_worker("m")
    del worker.host.models["m"]
    pending = rig.submit([1])
    await rig.serve(worker)

    error = await rig.error(pending)
    assert isinstance(error, Unavailable)
    assert error.code == "MODEL_NOT_LOADED"


@in_rig()
async def test_answers_raise_the_rate_that_retry_after_is_computed_from(rig: Rig) -> None:
    worker = rig.start_worker("m")
    for pending in [rig.submit([1] * 10) for _ in range(4)]:
        await rig.serve(worker)
        await rig.rows(pending)
    rig.engine._rate_at_ns = 0
    rig.engine.expire(2 * 10**9)

    assert rig.engine.tokens_per_s == pytest.approx(20)


@in_rig(budget=Budget(max_tokens=4, max_items=2, max_age_ns=10**9))
async def test_request_larger_than_a_step_is_answered_once_whole(rig: Rig) -> None:
    worker = rig.start_worker("m")
    items = [[i] * 3 for i in range(1, 8)]
    pending = rig.submit(*items)
    worker.turn(6)
    await rig.settle()
    assert not pending.future.done()
    await rig.serve(worker)

    assert await rig.rows(pending) == [checksum(ids) for ids in items]
    assert len(worker.ran) == 7


@in_rig()
async def test_cancelled_waiter_s_reply_goes_back(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    task = asyncio.ensure_future(rig.rows(pending))
    await rig.settle()
    task.cancel()
    await rig.serve(worker)

    assert task.cancelled()


@in_rig()
async def test_header_that_the_worker_refuses_is_an_error_of_that_request_alone(rig: Rig) -> None:
    worker = rig.start_worker("m")
    bad, good = rig.submit([1], truncate_dim=99), rig.submit([2])
    await rig.serve(worker)

    assert "99" in str(await rig.error(bad))
    assert await rig.rows(good) == [checksum([2])]
    arrays = [("cu_seqlens", np.array([0, 2, 1], np.int32)), ("token_ids", np.array([1], np.int32))]
    unreadable = rig.engine.submit(WorkHeader("m", "encode", 2, ()), arrays, 1, 1 << 62)
    await rig.serve(worker)
    assert isinstance(await rig.error(unreadable), Internal)
