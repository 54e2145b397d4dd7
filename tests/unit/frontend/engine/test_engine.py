from __future__ import annotations

import asyncio
import time
import tracemalloc

import numpy as np
import pytest

from sie.values.errors import ClientGone, DeadlineExceeded, InputTooLong, Internal, NotFound, Overloaded, Unavailable
from sie.values.work import WorkHeader
from sie.workers.scheduling.waiting import Budget
from tests.unit.engine_rig import MIB, Rig, checksum, in_rig


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


@in_rig()
async def test_answers_raise_the_rate_that_retry_after_is_computed_from(rig: Rig) -> None:
    worker = rig.start_worker("m")
    for pending in [rig.submit([1] * 10) for _ in range(4)]:
        await rig.serve(worker)
        await rig.rows(pending)
    rig.engine._replies.measured_ns = 0
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
    worker = rig.start_worker("m")
    first = rig.submit(np.ones(MIB // 6, np.int32))
    with pytest.raises(Overloaded, match="request memory"):
        rig.submit(np.ones(MIB // 6, np.int32))
    await rig.serve(worker)
    await rig.rows(first)
    assert rig.engine.num_extents == 0


@pytest.mark.parametrize("large_bytes", [0, MIB])
def test_request_that_can_never_fit_is_too_long(large_bytes: int) -> None:
    """Whoever sent it would be told to come back for ever."""

    @in_rig(max_large_bytes=large_bytes)
    async def submit(rig: Rig) -> None:
        rig.start_worker("m")
        with pytest.raises(InputTooLong, match="max_large_bytes") as caught:
            rig.submit(np.ones(MIB // 4 + 1, np.int32))
        assert (caught.value.http_status, caught.value.retryable) == (413, False)
        assert rig.engine.num_extents == 0

    submit()


@in_rig()
async def test_requests_that_wait_for_the_first_worker_fill_the_queue(rig: Rig) -> None:
    rig.tell("m", recovering=True)
    rig.engine._limits = type(rig.engine._limits)(max_queued_tokens=10)
    waiting = rig.submit([1] * 50)
    with pytest.raises(Overloaded, match="max_queued_tokens"):
        rig.engine.check_open()
    await rig.serve(rig.start_worker("m"))

    rig.engine.check_open()
    await rig.rows(waiting)


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


@in_rig()
async def test_request_goes_to_another_worker_when_the_queue_of_the_first_choice_is_full(rig: Rig) -> None:
    slow, fast = rig.start_worker("m"), rig.start_worker("m")
    rig.engine._limits = type(rig.engine._limits)(max_queued_tokens=10)
    rig.engine._links[slow.slot].slowness = 4.0
    requests = [rig.submit([1] * 3), rig.submit([2] * 9), rig.submit([3] * 4)]  # 12 ahead of it are over 4 x 3
    assert [pending.link.slot for pending in requests] == [slow.slot, fast.slot, slow.slot]
    with pytest.raises(Overloaded, match="max_queued_tokens"):
        rig.submit([4] * 4)
    await rig.serve(slow)
    await rig.serve(fast)

    for pending in requests:
        await rig.rows(pending)


@in_rig()
async def test_long_lists_of_labels_are_not_kept(rig: Rig) -> None:
    worker = rig.start_worker("m")
    tracemalloc.start()
    for number in range(40):
        pending = rig.submit([1], task=number.to_bytes() * 250_000)
        await rig.serve(worker)
        await rig.rows(pending)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 * MIB, "every layout of 20 MB of tasks was kept"


def large(num_tokens: int) -> list[tuple[str, np.ndarray]]:
    return [("cu_seqlens", np.array([0, num_tokens], np.int32)), ("token_ids", np.arange(num_tokens, dtype=np.int32))]


@in_rig(request_segment_bytes=8 * MIB, large_extent_bytes=8 * MIB)
async def test_event_loop_turns_while_a_large_request_is_copied(rig: Rig) -> None:
    worker = rig.start_worker("m")
    num_tokens = MIB  # of four bytes
    header = WorkHeader("m", "encode", 1, ())
    copying = asyncio.ensure_future(rig.engine.submit_large(header, large(num_tokens), num_tokens, 1 << 62))
    num_turns = 0
    while not copying.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns >= 4
    await rig.serve(worker)
    assert await rig.rows(copying.result()) == [checksum(range(num_tokens))]


@in_rig(request_segment_bytes=8 * MIB, large_extent_bytes=8 * MIB)
async def test_large_request_that_is_cancelled_while_it_is_copied_gives_its_memory_back(rig: Rig) -> None:
    rig.start_worker("m")
    copying = asyncio.ensure_future(rig.engine.submit_large(WorkHeader("m", "encode", 1, ()), large(MIB), MIB, 1 << 62))
    await asyncio.sleep(0)
    assert rig.engine.num_extents == 1
    copying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert rig.engine.num_extents == 0
