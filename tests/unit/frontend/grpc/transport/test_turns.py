"""The turns of the event loop: how much of one clients get, and in which order they wait for the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sie.frontend.grpc.transport import turns as turns_module
from sie.frontend.grpc.transport.turns import CALL_NS, Share, Turns

MS = 1_000_000


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_ns = 1000 * MS

    def monotonic_ns(self) -> int:
        return self.now_ns


class Rig:
    """Turns of 2 ms on a clock and an event loop of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(turns_module, "time", self.clock)
        self.later: list[Callable[[], None]] = []
        self.turns = Turns()
        self.turns.turn_ns = 2 * MS
        self.turns.call_soon = self._append
        self.served: list[str] = []

    def _append(self, callback: Callable[[], None]) -> None:
        self.later.append(callback)

    def go_on(self) -> None:
        """Run one iteration of the loop."""
        self.later, due = [], self.later
        for callback in due:
            callback()

    def work(self, name: str, num_ns: int, times: int = 1) -> Callable[[], bool]:
        """Return work of a connection that takes a slice's time as often as this."""
        left = [times]

        def serve() -> bool:
            self.served.append(name)
            self.clock.now_ns += num_ns
            left[0] -= 1
            return left[0] > 0

        return serve


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_new_bytes_have_the_time_of_a_turn_and_the_next_turn_has_its_own(rig: Rig):
    turns, clock = rig.turns, rig.clock
    assert turns.begin(clock.now_ns)
    clock.now_ns += 2 * MS
    assert turns.begin(clock.now_ns)
    clock.now_ns += 1
    assert not turns.begin(clock.now_ns)
    rig.go_on()
    assert turns.begin(clock.now_ns)


def test_calls_that_begin_take_time_before_they_run(rig: Rig):
    num = 0
    while rig.turns.begin_call():
        num += 1
    assert num == 2 * MS // CALL_NS + 1
    rig.go_on()
    assert rig.turns.begin_call()


def test_what_waits_is_served_for_the_time_of_a_turn_and_goes_on_in_the_next(rig: Rig):
    rig.turns.wait(Share(), rig.work("flood", MS // 2, times=10))
    rig.go_on()
    assert len(rig.served) == 4
    rig.go_on()
    rig.go_on()
    assert len(rig.served) == 10
    assert not rig.later, "a loop with nothing to do must not turn"


def test_who_was_served_least_passes_a_thousand_who_flood(rig: Rig):
    shares = [Share() for _ in range(1000)]
    for share in shares:
        rig.turns.wait(share, rig.work("flood", MS // 2, times=100))
    for _ in range(300):
        rig.go_on()
    rig.served.clear()
    rig.turns.wait(Share(), rig.work("good", 1000))
    rig.go_on()
    assert rig.served.index("good") == 0


def test_a_connection_that_used_the_turn_waits_behind_one_that_did_not(rig: Rig):
    rig.turns.wait(Share(), rig.work("flood", MS // 2), used_ns=2 * MS)
    rig.turns.wait(Share(), rig.work("good", 1000))
    rig.go_on()
    assert rig.served == ["good", "flood"]


def test_many_waits_of_one_connection_are_counted_against_it(rig: Rig):
    busy = Share()
    for _ in range(100):
        rig.turns.wait(busy, rig.work("busy", 1000), cost_ns=CALL_NS)
    rig.go_on()
    assert len(rig.served) <= 2 * MS // CALL_NS, "what they start has its time, too"
    rig.served.clear()
    rig.turns.wait(Share(), rig.work("good", 1000), cost_ns=CALL_NS)
    rig.go_on()
    assert rig.served[0] == "good"


def test_the_work_of_those_that_left_is_cancelled_faster_than_others_can_come(rig: Rig):
    num_cancelled = 0

    def cancel() -> None:
        nonlocal num_cancelled
        num_cancelled += 1

    for _ in range(10_000):
        rig.turns.leave(cancel)
    rig.go_on()
    before, num_begun = num_cancelled, 0
    for _ in range(100):
        while rig.turns.begin_call():
            num_begun += 1
        rig.go_on()
    assert num_cancelled - before > 2 * num_begun > 0
    for _ in range(400):
        rig.go_on()
    assert num_cancelled == 10_000
    assert not rig.later
