"""The step loop when there is no room, or no credit, for a reply."""

from __future__ import annotations

from sie.ipc import messages
from sie.shm.layout import RELEASE
from sie.values.errors import BadRequest, Overloaded
from sie.workers.scheduling.waiting import Budget
from tests.unit.engine_rig import Rig, checksum, in_rig

TWO_ITEMS = Budget(max_tokens=1000, max_items=2, max_age_ns=10**12)
WIDTH = 65536


@in_rig()
async def test_request_without_room_for_its_reply_waits_for_a_release(rig: Rig) -> None:
    worker = rig.start_worker("wide", "m")
    unread = [rig.submit([i], model="wide") for i in (1, 2, 3)]
    await rig.serve(worker)
    waiting, small = rig.submit([4], model="wide"), rig.submit([5])
    await rig.serve(worker)

    assert await rig.rows(small) == [checksum([5])], "another model's request is not held up"
    assert not waiting.future.done()
    for pending in unread:
        await rig.rows(pending)
    await rig.serve(worker)
    assert await rig.rows(waiting) == [checksum([4], WIDTH)]


@in_rig(budget=TWO_ITEMS)
async def test_frontend_that_reads_nothing_blocks_only_itself(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    other = Rig(budget=TWO_ITEMS)
    other.tell("wide", workers=(0,))
    other.attach(worker, frontend=1)
    mine = [rig.submit([i], model="wide") for i in range(1, 12)]
    worker.turn(8)
    theirs = other.submit([50], model="wide")
    worker.turn(2)
    await other.settle()

    assert await other.rows(theirs) == [checksum([50], WIDTH)]
    assert [pending.future.done() for pending in mine] == [True] * 3 + [False] * 8
    for pending in mine:
        await rig.rows(pending)
        await rig.serve(worker)
    other.close()


@in_rig(budget=TWO_ITEMS)
async def test_items_of_a_request_that_waits_for_room_are_neither_lost_nor_run_twice(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    unread = [rig.submit([i], model="wide") for i in (1, 2)]
    await rig.serve(worker)
    waiting = rig.submit([4] * 5, [5], [6], model="wide")
    worker.turn(2)
    assert len(worker.ran) == 1, "its reply of three rows finds no room"
    for pending in unread:
        await rig.rows(pending)
    await rig.serve(worker)

    assert await rig.rows(waiting) == [checksum(ids, WIDTH) for ids in ([4] * 5, [5], [6])]
    assert worker.ran[1:] == [[[5], [6]], [[4] * 5]]


@in_rig()
async def test_waiting_for_room_is_no_busy_loop(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    unread = [rig.submit([i], model="wide") for i in (1, 2, 3)]
    await rig.serve(worker)
    waiting = rig.submit([4], model="wide")
    worker.turn()

    assert not worker.loop._state, "else the loop would plan it again and again"
    for pending in (*unread, waiting):
        await rig.rows(pending)
        await rig.serve(worker)


@in_rig()
async def test_reply_that_can_never_fit_is_refused_at_once(rig: Rig) -> None:
    worker = rig.start_worker("wide", "m")
    too_large, small = rig.submit([1], [2], [3], [4], model="wide"), rig.submit([5])
    await rig.serve(worker)

    assert isinstance(await rig.error(too_large), BadRequest)
    assert await rig.rows(small) == [checksum([5])]


@in_rig()
async def test_error_without_room_for_its_text_waits_for_a_release_and_is_not_another_one(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    rig.tell("absent", workers=(0,))
    unread = [rig.submit([i], model="wide") for i in (1, 2, 3)]
    await rig.serve(worker)
    (link,) = worker.loop._links.values()
    rest = list(iter(lambda: link.lease(64), None))
    refused = [rig.submit([i], model="absent") for i in (4, 5)]
    await rig.serve(worker)
    assert not any(pending.future.done() for pending in refused)
    for pending in unread:
        await rig.rows(pending)
    await rig.serve(worker)

    for pending in refused:
        assert (await rig.error(pending)).code == "MODEL_NOT_LOADED"
    for lease in rest:
        lease.end()


@in_rig()
async def test_request_cancelled_while_it_waits_for_room_never_runs(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    unread = [rig.submit([i], model="wide") for i in (1, 2, 3)]
    await rig.serve(worker)
    waiting = rig.submit([4], model="wide")
    worker.turn()
    rig.engine.abandon(waiting, Overloaded("gave up"))
    for pending in unread:
        await rig.rows(pending)
    await rig.serve(worker)

    assert isinstance(await rig.error(waiting), Overloaded)
    assert worker.ran == [[[1], [2], [3]]]


@in_rig(budget=TWO_ITEMS)
async def test_room_of_a_request_cancelled_in_the_same_step_is_room(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    gone = rig.submit([1], [2], [3] * 9, model="wide")
    worker.turn()
    waiting = rig.submit([4], [5] * 12, model="wide")
    rig.engine.abandon(gone, Overloaded("gave up"))
    await rig.serve(worker)

    assert isinstance(await rig.error(gone), Overloaded)
    assert await rig.rows(waiting) == [checksum([4], WIDTH), checksum([5] * 12, WIDTH)]


@in_rig(budget=TWO_ITEMS)
async def test_room_that_a_cancelled_request_leaves_is_found(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    gone = rig.submit([1], [2], [3] * 9, model="wide")
    worker.turn()
    waiting = rig.submit([4], [5] * 3, model="wide")
    worker.turn()  # set aside: nothing has room beside the first
    rig.engine.abandon(gone, Overloaded("gave up"))
    worker.turn(2)
    await rig.serve(worker)

    assert isinstance(await rig.error(gone), Overloaded)
    assert await rig.rows(waiting) == [checksum([4], WIDTH), checksum([5] * 3, WIDTH)]


@in_rig()
async def test_unload_waits_for_what_waits_for_room(rig: Rig) -> None:
    worker = rig.start_worker("wide")
    unread = [rig.submit([i], model="wide") for i in (1, 2, 3)]
    await rig.serve(worker)
    waiting = rig.submit([4], model="wide")
    worker.turn()
    worker.supervisor.send(messages.Unload("wide"))
    worker.turn(2)
    assert "wide" in worker.host.models
    for pending in unread:
        await rig.rows(pending)
    await rig.serve(worker)

    assert await rig.rows(waiting) == [checksum([4], WIDTH)]
    assert worker.host.models == {}


@in_rig(ring_capacity=8)
async def test_replies_without_credit_are_sent_when_the_frontend_reads(rig: Rig) -> None:
    worker = rig.start_worker("m")
    other = Rig(ring_capacity=8)
    other.tell("m", workers=(0,))
    other.attach(worker, frontend=1)
    requests = [other.submit([i]) for i in range(1, 5)]
    (_, link) = worker.loop._links.values()
    while link.attachment.push(RELEASE, 0, 0, 0, 0):
        pass  # fills the ring with what the frontend will report it for
    worker.turn(2)
    assert not link.flush()
    assert len(worker.ran[0]) == 4

    for frontend_link in other.engine._workers:
        frontend_link.attachment.drain()  # the frontend reads
    worker.turn()
    await other.settle()
    for i, pending in enumerate(requests, 1):
        assert await other.rows(pending) == [checksum([i])]
    other.close()
