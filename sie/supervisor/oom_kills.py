"""Tells whether the kernel recently killed a process for lack of memory. Its counters name no process.

So a SIGKILL counts as an out-of-memory kill only if the counter grew within the last seconds. An older kill of any
process does not explain a death now. The counter is that of this process's control group, which its workers share: on a
host of many containers, those of others are killed, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from sie.values.cgroup_paths import SYSFS, cgroup_paths, read_lines

_WINDOW_S: Final = 10.0
"""A killed process with much memory takes seconds to exit, so the counter grows before its death is seen."""
_SAMPLE_S: Final = 1.0


def count_oom_kills(*, proc: Path = Path("/proc"), sysfs: Path = SYSFS) -> int:
    """Return the number of out-of-memory kills in this process's control group, or of the whole host if it has none.

    Returns 0 if the kernel reports neither.
    """
    for path in (*_group_files(proc, sysfs), proc / "vmstat"):
        for line in read_lines(path):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return 0


def _group_files(proc: Path, sysfs: Path) -> Iterator[Path]:
    """Yield the files that may count the kills in our group, of either version: not of the groups below it, where it can be told.

    A container may see its own group as the root, and its path on the host all the same.
    """
    for own in cgroup_paths("memory", proc=proc, sysfs=sysfs):
        names = ("memory.events.local", "memory.events") if own.is_unified else ("memory.oom_control",)
        for group in (own.path, own.root):
            yield from (group / name for name in names)


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
