"""Tells whether the kernel recently killed a process for lack of memory. Its counter is host-wide and names no process.

So a SIGKILL counts as an out-of-memory kill only if the counter grew within the last seconds. An older kill of any
process does not explain a death now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

_WINDOW_S: Final = 10.0
"""A killed process with much memory takes seconds to exit, so the counter grows before its death is seen."""
_SAMPLE_S: Final = 1.0


def count_oom_kills() -> int:
    """Return the number of out-of-memory kills since boot; 0 if the kernel does not report it."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class OomKills:
    """The counter's values over the last seconds. Times are seconds on a monotonic clock, passed in."""

    def __init__(self, count: Callable[[], int] = count_oom_kills) -> None:
        self._count = count
        self._samples = deque([(float("-inf"), count())])
        self._explained = 0
        """The counter value up to which kills have already explained a death."""

    def tick(self, now_s: float) -> None:
        """Read the counter, at most once a second, and drop the readings outside the window."""
        if now_s - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now_s, self._count()))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()

    def explain_death(self) -> bool:
        """Return whether a kill within the window can explain a death. Each kill explains one death."""
        self._explained = max(self._explained, self._samples[0][1])
        if self._count() <= self._explained:
            return False
        self._explained += 1
        return True
