"""Judges which processes hang and whether a death may be the input's fault. Pure: the caller passes the time.

A worker hangs if now > started + allowed + watchdog. It publishes these before each step, and five times a second
between steps; `allowed` grows with the step's size. After an announced stall (`sie.workers.stall_notices`) the time
counts from the stall's end. Intervals in which the supervisor's own tick came late do not count, so a starved machine
kills no process.
"""

from __future__ import annotations

import signal
from typing import Final, Literal

from sie.shm.inflight import InflightStatus

_LATE_TICK_S = 0.5
_DUMP_S = 0.5
"""Time between SIGABRT, on which the worker prints its stacks, and SIGKILL."""

LATE_S: Final = 1.0
"""A worker over its allowance by more than this is late: its requests go to other workers, too."""
_STARVED_SHARE: Final = 0.1

Verdict = Literal["fine", "abort", "kill"]


class HangDetector:
    """Judges one server's workers at each tick, and remembers their state between ticks."""

    def __init__(self, watchdog_s: float) -> None:
        self.watchdog_s = watchdog_s
        self._last_tick_s = 0.0
        self._forgiven_s: dict[int, tuple[int, float]] = {}
        """By slot: start of the step (ns), and its seconds that do not count."""
        self._aborted_s: dict[int, float] = {}
        self._over_s: dict[int, float] = {}  # by slot: seconds over its allowance, when last judged
        self._excused_s: dict[int, float] = {}  # by slot: end of the stall that it announced
        self._late_since: dict[int, tuple[float, float]] = {}  # by slot: first look while late, processor time then
        self._stopped: set[int] = set()
        self._starved: set[int] = set()

    def excuse(self, slot: int, until_s: float) -> None:
        """Record until when a worker may stall. The latest notice counts."""
        self._excused_s[slot] = until_s

    def tick(self, now_s: float) -> float:
        """Record a tick. Return by how many seconds it came late, or 0 if the delay is small enough to ignore."""
        gap_s = now_s - self._last_tick_s if self._last_tick_s else 0.0
        self._last_tick_s = now_s
        return gap_s if gap_s > _LATE_TICK_S else 0.0

    def judge_worker(self, slot: int, status: InflightStatus, now_s: float, late_s: float) -> Verdict:
        """Return the verdict on a worker from its status page. late_s is the result of `tick`."""
        if slot in self._aborted_s:
            return "kill" if now_s - self._aborted_s[slot] > _DUMP_S else "fine"
        if not status.started_ns:  # its loop has not run yet, or it writes faster than its page can be read
            self._over_s.pop(slot, None)
            self._forget_lateness(slot)
            return "fine"
        started_ns, forgiven_s = self._forgiven_s.get(slot, (0, 0.0))
        forgiven_s = late_s + (forgiven_s if started_ns == status.started_ns else 0.0)
        self._forgiven_s[slot] = (status.started_ns, forgiven_s)
        excused_s = self._excused_s.get(slot, 0.0)
        if excused_s > now_s - late_s:  # the stall's end was still ahead when the late interval began
            excused_s = self._excused_s[slot] = excused_s + late_s
        over_s = now_s - max((status.started_ns + status.allowed_ns) / 1e9 + forgiven_s, excused_s)
        self._over_s[slot] = over_s
        if over_s <= LATE_S:
            self._forget_lateness(slot)
        if over_s <= self.watchdog_s:
            return "fine"
        self._aborted_s[slot] = now_s
        return "abort"

    def is_hung(self, slot: int, grace_s: float) -> bool:
        """Return whether a worker hangs, or will count as hung within grace_s or half of watchdog_s (the lesser)."""
        if slot in self._aborted_s:
            return True
        return self._over_s.get(slot, 0.0) > self.watchdog_s - min(grace_s, self.watchdog_s / 2)

    def is_late(self, slot: int) -> bool:
        """Return whether a worker was over its allowance by more than LATE_S when it was last judged."""
        return self._over_s.get(slot, 0.0) > LATE_S

    def note_run_state(self, slot: int, state: str, cpu_s: float, now_s: float) -> None:
        """Record the process state (its letter in proc(5)) and processor time of a late worker.

        A worker that is stopped, or is runnable and gets almost no processor time, cannot run its step. A worker that
        sleeps could run: its input may have blocked it.
        """
        since_s, first_cpu_s = self._late_since.setdefault(slot, (now_s, cpu_s))
        if state in "Tt":
            self._stopped.add(slot)
        if state == "R" and cpu_s - first_cpu_s < _STARVED_SHARE * (now_s - since_s):
            self._starved.add(slot)
        else:
            self._starved.discard(slot)

    def blames_input(self, status: int, slot: int, *, was_oom_killed: bool) -> bool:
        """Return whether the running input may have caused a death.

        was_oom_killed: the kernel killed the worker for lack of memory. Any other SIGKILL that was not ours came from
        outside and says nothing about the input. The same holds for a SIGTERM, after which a worker exits with 0, and
        for our own kill of a worker that could not run (`note_run_state`).
        """
        if status == 0:
            return False
        if slot in self._aborted_s and slot in self._stopped | self._starved and not was_oom_killed:
            return False
        return status != -signal.SIGKILL or slot in self._aborted_s or was_oom_killed

    def forget(self, slot: int) -> None:
        """Clear the state of a slot for its next process."""
        self._aborted_s.pop(slot, None)
        self._over_s.pop(slot, None)
        self._forgiven_s.pop(slot, None)
        self._excused_s.pop(slot, None)
        self._forget_lateness(slot)

    def _forget_lateness(self, slot: int) -> None:
        self._late_since.pop(slot, None)
        self._stopped.discard(slot)
        self._starved.discard(slot)
