"""Judges who hangs and whose fault a death was. Pure.

Hung means: now > started + allowed + watchdog, from what the worker publishes before each step, and five times a second
between steps; `allowed` grows with the step's size. What a worker announced as a silence (`sie.workers.stall_notices`) counts
from its end. Intervals in which the supervisor's own tick came late are forgiven, so a starved machine kills nobody.
"""

from __future__ import annotations

import signal
from typing import Literal

from sie.shm.inflight import InflightStatus

_LATE_TICK_S = 0.5
_DUMP_S = 0.5
"""Time between SIGABRT, on which the worker prints its stacks, and SIGKILL."""

Verdict = Literal["fine", "abort", "kill"]


class Watch:
    """What the supervisor remembers between ticks."""

    def __init__(self, watchdog_s: float) -> None:
        self.watchdog_s = watchdog_s
        self._last_tick_s = 0.0
        self._forgiven_s: dict[int, tuple[int, float]] = {}  # by slot: since when, how many seconds
        self._aborted_s: dict[int, float] = {}
        self._over_s: dict[int, float] = {}  # by slot: for how long it is over its allowance, as last judged
        self._excused_s: dict[int, float] = {}  # by slot: until when it said that it may stand still

    def excuse(self, slot: int, until_s: float) -> None:
        """Note that a worker may stand still until then; the last word on it counts."""
        self._excused_s[slot] = until_s

    def tick(self, now_s: float) -> float:
        """Note a tick; return by how many seconds it came late, when that is so much that nobody's silence counts."""
        gap_s = now_s - self._last_tick_s if self._last_tick_s else 0.0
        self._last_tick_s = now_s
        return gap_s if gap_s > _LATE_TICK_S else 0.0

    def judge_worker(self, slot: int, status: InflightStatus, now_s: float, late_s: float) -> Verdict:
        """Say what to do about a worker, from its status page. late_s is what `tick` returned."""
        if slot in self._aborted_s:
            return "kill" if now_s - self._aborted_s[slot] > _DUMP_S else "fine"
        if not status.started_ns:  # its loop has not turned yet, or it writes faster than its page can be read
            self._over_s.pop(slot, None)
            return "fine"
        started_ns, forgiven_s = self._forgiven_s.get(slot, (0, 0.0))
        forgiven_s = late_s + (forgiven_s if started_ns == status.started_ns else 0.0)
        self._forgiven_s[slot] = (status.started_ns, forgiven_s)
        excused_s = self._excused_s.get(slot, 0.0)
        if excused_s > now_s - late_s:  # it lay ahead when the late interval began
            excused_s = self._excused_s[slot] = excused_s + late_s
        over_s = now_s - max((status.started_ns + status.allowed_ns) / 1e9 + forgiven_s, excused_s)
        self._over_s[slot] = over_s
        if over_s <= self.watchdog_s:
            return "fine"
        self._aborted_s[slot] = now_s
        return "abort"

    def is_silent(self, slot: int, grace_s: float) -> bool:
        """Return whether a worker hangs, or will be judged so within grace_s, or half of watchdog_s if that is less."""
        if slot in self._aborted_s:
            return True
        return self._over_s.get(slot, 0.0) > self.watchdog_s - min(grace_s, self.watchdog_s / 2)

    def blames_input(self, status: int, slot: int, *, had_no_memory: bool) -> bool:
        """Return whether the running input may have caused a death.

        had_no_memory: the kernel killed the worker for want of memory. Any other SIGKILL that was not ours came from
        outside and says nothing about the input, as does the SIGTERM on which a worker exits with 0.
        """
        if status == 0:
            return False
        return status != -signal.SIGKILL or slot in self._aborted_s or had_no_memory

    def forget(self, slot: int) -> None:
        """Start afresh with a slot's next process."""
        self._aborted_s.pop(slot, None)
        self._over_s.pop(slot, None)
        self._forgiven_s.pop(slot, None)
        self._excused_s.pop(slot, None)
