"""Tells whether the kernel killed a process for want of memory lately. Its counter is host-wide and names no process.

So a SIGKILL counts as such a kill only if the counter grew within the last seconds. An older kill, of whatever process,
says nothing about a death now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

_WINDOW_S: Final = 10.0
"""A killed process with much memory takes seconds to go: the counter grows before its death is seen."""
_SAMPLE_S: Final = 1.0


def count_oom_kills() -> int:
    """Return how many processes the kernel killed for want of memory since boot; 0 where it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class OomKills:
    """The counter as it was over the last seconds. Times are seconds on a monotonic clock, and passed in."""

    def __init__(self, count: Callable[[], int] = count_oom_kills) -> None:
        self._count = count
        self._samples = deque([(float("-inf"), count())])
        self._explained = 0
        """Reading up to which kills have been taken to explain a death."""

    def tick(self, now_s: float) -> None:
        """Read the counter, once a second at most, and forget readings that have left the window."""
        if now_s - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now_s, self._count()))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()

    def explain_death(self) -> bool:
        """Return whether a kill within the window can be a death's cause; each kill explains one death."""
        self._explained = max(self._explained, self._samples[0][1])
        if self._count() <= self._explained:
            return False
        self._explained += 1
        return True
