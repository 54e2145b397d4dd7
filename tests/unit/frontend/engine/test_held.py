"""Requests that wait for a worker: their sums, and that one model's do not hold up another's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sie.frontend.engine.held import HeldRequests
from tests.unit.engine_rig import Rig, checksum, in_rig


def request(number: int, model: str = "m", adapter: str = "", stream: object = None) -> Any:
    lease = SimpleNamespace(nbytes=100)
    return SimpleNamespace(
        request_id=number, model=model, adapter=adapter, num_tokens=number, stream=stream, lease=lease
    )


def test_sums_and_groups_follow_what_comes_and_goes() -> None:
    held = HeldRequests()
    first, second, third, other = request(1), request(2, stream=object()), request(3, adapter="a"), request(4, "n")
    for pending in (first, second, third, other):
        held.add(pending)
    assert (len(held), held.num_tokens, held.stream_bytes) == (4, 10, 100)
    assert held.groups() == [[first, second], [third], [other]]
    for pending in held:
        if pending is not first:
            assert held.remove(pending)
            assert not held.remove(pending)
    assert (len(held), held.num_tokens, held.stream_bytes) == (1, 1, 0)
    assert held.groups() == [[first]]


@in_rig(ring_capacity=4)
async def test_more_than_a_ring_takes_is_placed_as_room_comes_beside_a_model_that_is_not_back(rig: Rig) -> None:
    """A worker takes two at a time; the requests of the other model came first."""
    rig.start_worker("m", "n")
    rig.die(rig.workers[0], recovering=("m", "n"))
    stuck = rig.submit([9], model="n")
    waiting = [rig.submit([i]) for i in range(1, 7)]
    second = rig.start_worker("m", slot=1)
    rig.engine.place_held()
    await rig.serve(second)
    while rig.engine.num_pending > 1:
        await rig.settle()
        await rig.serve(second)

    for i, pending in enumerate(waiting, 1):
        assert await rig.rows(pending) == [checksum([i])]
        await rig.serve(second)
    rig.tell("n")
    rig.engine.fail_held()
    await rig.error(stuck)
