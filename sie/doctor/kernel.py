"""Checks the kernel features that the server needs, by using each once."""

from __future__ import annotations

import os
import platform
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from sie.config.settings import Settings
from sie.doctor.finding import Finding
from sie.shm.segment import ReservationError, Segment
from sie.supervisor.host_resources import count_frontends

_SYSCTL = Path("/proc/sys/net")


def check_kernel(settings: Settings) -> Iterator[Finding]:
    """Check system calls and kernel settings."""
    needs: tuple[tuple[str, Callable[[], None], str], ...] = (
        ("sealed memory (memfd_create, F_SEAL_FUTURE_WRITE)", _try_memory, "Linux 5.1 or newer is needed"),
        ("process descriptors (pidfd_open, pidfd_send_signal)", _try_pidfd, "Linux 5.3 or newer is needed"),
        ("event counters (eventfd)", _try_eventfd, "allow eventfd2 in the container's system calls"),
        ("listeners that share a port (SO_REUSEPORT)", _try_reuseport, "Linux 3.9 or newer is needed"),
    )
    yield Finding(area="kernel", level="ok", message=f"Linux {platform.release()}")
    for name, attempt, fix in needs:
        try:
            attempt()
        except (OSError, AttributeError, ReservationError) as error:
            hint = f"{fix}; in a container its system call filter may be in the way"
            yield Finding(area="kernel", level="error", message=f"{name}: {error}", fix=hint)
        else:
            yield Finding(area="kernel", level="ok", message=name)
    yield _check_migration(count_frontends(settings.server.frontends))
    yield _check_backlog(settings.server.backlog)


def _try_memory() -> None:
    Segment.create("doctor", 65536).close()


def _try_pidfd() -> None:
    fd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(fd, 0)  # type: ignore[arg-type]  # 0 only checks that a signal could be sent
    finally:
        os.close(fd)


def _try_eventfd() -> None:
    os.close(os.eventfd(0, os.EFD_CLOEXEC))


def _try_reuseport() -> None:
    with socket.socket() as one, socket.socket() as other:
        for sock in (one, other):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(("127.0.0.1", 0))
        other.bind(one.getsockname())


def _check_migration(num_frontends: int) -> Finding:
    """Check if a dead frontend's connections move to another frontend, which Linux 5.14 or newer can do."""
    value = _read("ipv4/tcp_migrate_req")
    if value == 1:
        return Finding(area="kernel", level="ok", message="connections move on from a frontend that dies")
    if num_frontends == 1:
        return Finding(area="kernel", level="ok", message="one frontend: tcp_migrate_req does not matter")
    fix = "Linux 5.14 or newer can hand them on" if value is None else "sysctl -w net.ipv4.tcp_migrate_req=1"
    message = "connections that wait for a frontend are reset when it dies (net.ipv4.tcp_migrate_req)"
    return Finding(area="kernel", level="warn", message=message, fix=fix)


def _check_backlog(backlog: int) -> Finding:
    most = _read("core/somaxconn")
    if most is not None and most < backlog:
        message = f"backlog {backlog} is cut to {most} (net.core.somaxconn)"
        return Finding(area="kernel", level="warn", message=message, fix=f"sysctl -w net.core.somaxconn={backlog}")
    return Finding(area="kernel", level="ok", message=f"backlog {backlog} fits net.core.somaxconn")


def _read(name: str) -> int | None:
    try:
        return int((_SYSCTL / name).read_text())
    except (OSError, ValueError):
        return None
