"""Checks that the limits on processes and threads allow a start. Only reads /proc and /sys."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from sie.supervisor.host_resources import StartError
from sie.values.cgroup_paths import cgroup_paths

_SUPERVISOR: Final = 6
"""The supervisor, the template of the workers, and the process between the template and a worker that it forks."""
_FRONTEND: Final = 12
"""Granian and its child: the event loop, the threads that read and decode bodies, and its own runtime."""
_IMAGE_READERS: Final = 4
_GRPC: Final = 16
_WORKER: Final = 6
"""In addition to the compute threads."""


class Headroom(NamedTuple):
    """The name of a limit, and the number of tasks it still allows."""

    limit: str
    num_left: int


def needed_tasks(num_frontends: int, num_workers: int, num_threads: int, *, has_grpc: bool) -> int:
    """Return the number of a server's processes and threads; num_threads are the compute threads of one worker."""
    frontends = num_frontends * (_FRONTEND + _IMAGE_READERS)
    return _SUPERVISOR + frontends + num_workers * (_WORKER + num_threads) + (_GRPC if has_grpc else 0)


def check_tasks(needed: int) -> None:
    """Raise StartError if a limit allows fewer processes and threads than a start needs."""
    tightest = min(_headrooms(), key=lambda headroom: headroom.num_left, default=None)
    if tightest is not None and tightest.num_left < needed:
        raise StartError(
            f"processes and threads: a start needs {needed}, and {tightest.limit} leaves {max(0, tightest.num_left)}; "
            "raise it (TasksMax= of the unit, ulimit -u, pids_limit of a container)"
        )


def _headrooms() -> Iterator[Headroom]:
    for directory in chain.from_iterable(group.with_parents() for group in cgroup_paths("pids")):
        limit, used = _number(directory / "pids.max"), _number(directory / "pids.current")
        if limit is not None and used is not None:
            yield Headroom(f"{directory}/pids.max ({limit})", limit - used)
    limit = _user_limit()
    if limit is not None:
        yield Headroom(f"the limit of processes of user {os.getuid()} ({limit})", limit - _count_tasks(os.getuid()))


def _user_limit() -> int | None:
    """Return RLIMIT_NPROC, or None if it does not apply (root) or is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return None if os.geteuid() == 0 or soft == resource.RLIM_INFINITY else soft


def _count_tasks(uid: int) -> int:
    """Return the number of a user's processes and threads."""
    count = 0
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                if directory.stat().st_uid == uid:
                    count += sum(1 for _ in (directory / "task").iterdir())
            except OSError:  # the process has ended
                continue
    return count


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
