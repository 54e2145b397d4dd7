"""Owns this host's shared names: the runtime directory, the lock file, the port, and how cores and memory are shared out."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

from sie.config.sections import Memory

_CORES_PER_FRONTEND = 4


class StartError(Exception):
    """The server cannot start as it is set up; the message names the setting. The command exits with 78."""


def make_runtime_dir(base: Path) -> Path:
    """Create a private directory (0700) for this run's control socket beneath base.

    Raises StartError when base cannot be used, or is open to other users, who could then pose as the server.
    """
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(base)
        return Path(tempfile.mkdtemp(prefix="run-", dir=base))
    except OSError as error:
        raise StartError(f"runtime_dir: cannot create a directory in {base}: {error}") from error


def check_private(base: Path) -> None:
    """Raise StartError for a runtime directory in which somebody else could put things."""
    found = base.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StartError(f"runtime_dir: {base} belongs to another user, or others may write to it")


def take_lock(directory: Path, port: int) -> int:
    """Hold `sie-PORT.lock` for this process's life and return its descriptor.

    Raises StartError naming the holder's pid when another server holds it, or why it cannot be had.
    """
    path = directory / f"sie-{port}.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(f"runtime_dir: cannot open {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StartError(f"port {port}: another sie server (pid {holder}) holds {path}") from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _holder(directory: Path, port: int) -> str:
    """Return words that name the server which holds a port's lock; none when no server does."""
    try:
        with (directory / f"sie-{port}.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return ""
    except BlockingIOError:
        return f"; another sie server (pid {(directory / f'sie-{port}.lock').read_text().strip()}) has it"
    except OSError:
        return ""


def reserve_port(host: str, port: int, runtime_dir: Path | None = None, *, setting: str = "host/port") -> socket.socket:
    """Return a bound socket that keeps `port` ours (port 0: a free one) without ever accepting a connection.

    runtime_dir is where servers hold their locks, for the message when another one has the port; setting is what the message names.

    The frontends listen beside it with SO_REUSEPORT, which would also let a second server share the traffic in
    silence; so first the address must be free for an exclusive listener. Raises StartError when it is not.
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
        # From here no exclusive listener fits beside us, so a second server is refused before our frontends listen.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        reason = error.strerror or error
        holder = "" if runtime_dir is None else _holder(runtime_dir, port)
        raise StartError(f"{setting}: cannot listen on {host}:{port}: {reason}{holder}") from error
    return held


def usable_cores() -> list[int]:
    """Return the cores this process may run on, fewer when a cgroup's cpu.max allows less than all of them."""
    cores = sorted(os.sched_getaffinity(0))
    quota = _cgroup_cpu_quota()
    return cores if quota is None else cores[: max(1, min(len(cores), int(quota)))]


def count_frontends(setting: int) -> int:
    """Return how many frontends `frontends` means; 0 is one for every four usable cores."""
    return setting or max(1, len(usable_cores()) // _CORES_PER_FRONTEND)


def reserved_bytes(memory: Memory, num_frontends: int, num_workers: int) -> int:
    """Return how much shared memory a start reserves: segments, rings and pages of every process."""
    pairs = num_frontends * num_workers
    rings = 2 * pairs * memory.ring_capacity * 64
    pages = (1 + num_frontends + num_workers) * memory.counter_page_bytes
    return num_frontends * memory.request_segment_bytes + pairs * memory.reply_segment_bytes + rings + pages


def share_cores(cores: list[int], num_workers: int) -> list[tuple[int, ...]]:
    """Split cores into num_workers runs, as even as they come; with fewer cores than workers they share."""
    if num_workers <= 1:
        return [tuple(cores)]
    if len(cores) < num_workers:
        return [(cores[i % len(cores)],) for i in range(num_workers)]
    size, extra = divmod(len(cores), num_workers)
    shares: list[tuple[int, ...]] = []
    start = 0
    for i in range(num_workers):
        end = start + size + (1 if i < extra else 0)
        shares.append(tuple(cores[start:end]))
        start = end
    return shares


def _cgroup_cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)
