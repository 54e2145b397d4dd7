"""What the engine does when a worker dies, is to blame, or breaks the protocol."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from sie.frontend.engine import quarantine
from sie.ipc.messages import Detached, PeerFault, Quarantine
from sie.shm.layout import ERROR, RELEASE, REPLY
from sie.values.errors import ClientGone, Internal, PoisonInput, Unavailable, WorkerLost
from tests.unit.engine_rig import MIB, Rig, Worker, checksum, in_rig

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
    rig.engine.fail_over(worker.slot, worker.generation - 1, ())
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
async def test_worker_that_lives_and_has_closed_its_end_is_reported_and_its_work_runs_once_it_is_attached_again(
    rig: Rig,
) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    await rig.settle()
    generation = worker.generation
    worker.loop._detach_slot(0)
    await rig.settle()
    assert rig.sent == [Detached(worker.slot, generation)]
    rig.engine.fail_over(worker.slot, generation, ())
    rig.attach(worker)
    rig.engine.place_held()
    await rig.serve(worker)
    assert await rig.rows(pending) == [checksum([1])]


@in_rig()
async def test_input_that_kills_twice_is_refused_and_quarantined_for_all(rig: Rig) -> None:
    dead = rig.start_worker("m")
    poison, same = rig.submit([6, 6, 6]), rig.submit([6, 6, 6])
    rig.die(dead, suspects=(poison.request_id, same.request_id))
    second = rig.start_worker("m", slot=0)
    rig.die(second, suspects=(poison.request_id,))

    (message,) = rig.sent
    assert isinstance(message, Quarantine)
    rig.engine.quarantine(message.digest)
    assert isinstance(await rig.error(poison), PoisonInput)
    assert isinstance(await rig.error(same), PoisonInput), "it waits as a suspect and holds the same input"
    assert rig.engine.num_extents == 0


@in_rig()
async def test_inputs_are_hashed_only_as_long_as_one_is_refused(rig: Rig) -> None:
    worker = rig.start_worker("m")
    hashed: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quarantine, "digest_of", lambda _extent: hashed.append(b"") or b"other")
        rig.engine.quarantine(b"refused")
        first = rig.submit([1])
        assert len(hashed) == 1
        patch.setattr(quarantine, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 601))
        second = rig.submit([2])
        assert len(hashed) == 1
    await rig.serve(worker)
    for pending in (first, second):
        await rig.rows(pending)


@in_rig()
async def test_client_of_a_refused_input_hears_so_only_when_all_frontends_have(rig: Rig) -> None:
    """It might ask another one at once, and cost a third worker."""
    poison = None
    for _ in range(2):
        worker = rig.start_worker("m", slot=0)
        poison = poison or rig.submit([6, 6, 6])
        rig.die(worker, suspects=(poison.request_id,))
    assert poison is not None
    third = rig.start_worker("m", slot=0)
    other = rig.submit([7])
    await rig.serve(third)
    await rig.rows(other)
    rig.engine.fail_held()
    assert third.ran == [[[7]]]
    assert not poison.future.done()
    rig.engine.quarantine(poison.digest())
    assert isinstance(await rig.error(poison), PoisonInput)
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
def test_worker_that_breaks_the_protocol_is_reported_and_its_work_goes_elsewhere(kind, is_own_id, length) -> None:
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
