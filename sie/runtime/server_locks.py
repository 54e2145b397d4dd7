"""Finds the servers of this host by the lock files of their ports. `sie.supervisor.host_resources` makes the files."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Final

SERVICE_DIRECTORY: Final = "/run/sie"
"""The runtime directory of sie.service, which has its lock; outside the service, the defaults differ."""


def lock_name(port: int | str) -> str:
    """Return the name of a port's lock file, or a pattern for several."""
    return f"sie-{port}.lock"


def lock_holder(directory: Path, port: int) -> int | None:
    """Return the pid of the server that holds this port's lock, or None if no server does or the lock is unreadable."""
    try:
        with (directory / lock_name(port)).open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read(32))
    except (OSError, ValueError):
        pass
    return None


def find_server(runtime_dir: str, port: int) -> int | None:
    """Return the pid of the server that has a port, by its lock in runtime_dir or in the service's directory; or None."""
    return next(filter(None, (lock_holder(path, port) for path in lock_directories(runtime_dir))), None)


def lock_directories(runtime_dir: str) -> list[Path]:
    """Return the directories in which a server's lock may be, without repetition."""
    return [Path(path) for path in dict.fromkeys((runtime_dir, SERVICE_DIRECTORY))]


def locked_ports(directory: Path) -> list[int]:
    """Return the ports of the servers that hold a lock in this directory."""
    names = [path.name.removeprefix("sie-").removesuffix(".lock") for path in directory.glob(lock_name("*"))]
    ports = sorted(int(name) for name in names if name.isdecimal())
    return [port for port in ports if lock_holder(directory, port) is not None]
