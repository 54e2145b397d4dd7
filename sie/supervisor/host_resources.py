"""Takes this host's shared resources (runtime directory, lock file, port), and divides its cores and memory."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from sie.config.sections import Memory
from sie.runtime.run_directories import alone_in, make_locked, remove_unlocked
from sie.runtime.server_locks import lock_holder, lock_name

_RUN_PREFIX: Final = "run-"
_MAX_SOCKET_PATH_BYTES: Final = 107
_SOCKET_NAME: Final = "control"
"""The longest name of a socket in a run's directory."""
_CORES_PER_FRONTEND = 4


class StartError(Exception):
    """The server cannot start with these settings. The message names the setting, and the command exits with 78."""


@contextmanager
def make_runtime_dir(base: Path) -> Iterator[Path]:
    """Create a private directory (0700) under base for this run's sockets and files, and remove it at the end.

    It is locked meanwhile. Directories and lock files without such a lock belong to servers that were killed, and are
    removed first. Raises StartError if base cannot be used or if other users can write to it: they could pose as the server.
    """
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(base)
        with alone_in(base):
            remove_unlocked(base, f"{_RUN_PREFIX}*", _remove_run)
            remove_unlocked(base, lock_name("[0-9]*"), os.unlink)
            path, fd = make_locked(base, _RUN_PREFIX)
    except OSError as error:
        raise StartError(f"runtime_dir: cannot create a directory in {base}: {error}") from error
    try:
        _check_socket_paths(path)
        yield path
    finally:
        _remove_run(path)
        os.close(fd)


def _check_socket_paths(directory: Path) -> None:
    """Raise StartError if a run's directory has a name too long for the sockets in it. Source: unix(7), sun_path."""
    most = _MAX_SOCKET_PATH_BYTES - len(f"/{_SOCKET_NAME}")
    if len(os.fsencode(directory)) > most:
        more = len(os.fsencode(directory)) - len(os.fsencode(directory.parent))
        raise StartError(
            f"runtime_dir: {directory.parent} is longer than {most - more} bytes: its sockets would have no name"
        )


def _remove_run(path: Path) -> None:
    """Remove the directory of a run, which holds sockets, and the frontends' files of regions. One with other files stays."""
    shutil.rmtree(path / "regions", ignore_errors=True)
    with suppress(OSError):
        for entry in path.iterdir():
            if entry.is_socket():
                entry.unlink()
        path.rmdir()


def check_private(base: Path) -> None:
    """Raise StartError for a runtime directory to which another user can write."""
    found = base.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StartError(f"runtime_dir: {base} belongs to another user, or others may write to it")


@contextmanager
def take_lock(directory: Path, port: int) -> Iterator[None]:
    """Hold a lock on `sie-PORT.lock`, which contains our pid, and remove the file at the end.

    Raises StartError that names the other server's pid if it holds the lock, or the reason why the file cannot be
    written.
    """
    path = directory / lock_name(port)
    try:
        with alone_in(directory):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _lock(fd, path, port)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise StartError(f"runtime_dir: cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        # Nobody waits for a lock while the file is removed, so none is taken on a file that has no name any more.
        with suppress(OSError), alone_in(directory):
            path.unlink()
        os.close(fd)


def _lock(fd: int, path: Path, port: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StartError(f"port {port}: another sie server (pid {holder}) holds {path}") from error


def reserve_port(host: str, port: int, runtime_dir: Path | None = None, *, setting: str = "host/port") -> socket.socket:
    """Return a bound socket that reserves `port` (0: a free one) and never accepts a connection.

    runtime_dir holds the servers' locks; the error message names the server that has the port. setting is the name in
    that message.

    The frontends listen beside this socket with SO_REUSEPORT. That option would also let a second server share the
    traffic unnoticed, so the address must first be free for an exclusive listener. Raises StartError if it is not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
            port = probe.getsockname()[1]
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
        # From here no exclusive listener can bind, so a second server is refused before our frontends listen.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        reason = error.strerror or error
        pid = None if runtime_dir is None else lock_holder(runtime_dir, port)
        holder = (
            ""
            if pid is None
            else f"; another sie server (pid {pid}) has it: `sie stop --port {port}` stops it, `--port` chooses another"
        )
        raise StartError(f"{setting}: cannot listen on {host}:{port}: {reason}{holder}") from error
    return held


def usable_cores() -> list[int]:
    """Return the cores this process may run on, limited by the cgroup's cpu.max."""
    cores = sorted(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    return cores if quota is None else cores[: max(1, min(len(cores), int(quota)))]


def count_frontends(setting: int) -> int:
    """Return the number of frontends for `frontends`; 0 means one per four usable cores."""
    return setting or max(1, len(usable_cores()) // _CORES_PER_FRONTEND)


def reserved_bytes(memory: Memory, num_frontends: int, num_workers: int) -> int:
    """Return the shared memory that a start reserves: segments, rings and pages of every process."""
    pairs = num_frontends * num_workers
    rings = 2 * pairs * memory.ring_capacity * 64
    pages = (1 + num_frontends + num_workers) * memory.counter_page_bytes
    return num_frontends * memory.request_segment_bytes + pairs * memory.reply_segment_bytes + rings + pages


def _cgroup_cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
