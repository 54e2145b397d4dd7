"""Speaks sd_notify(3): readiness, status, watchdog and more time, when systemd started us; silent otherwise.

`Notifier` sends; `Herald` decides what to send and when. Neither waits for anybody.
"""

from __future__ import annotations

import os
import socket

EXTEND_EVERY_S = 5.0
_EXTEND_USEC = 30_000_000
"""What is asked for each time: enough that a busy host may miss a few turns."""
_MAX_STATUS_CHARS = 1024


class Notifier:
    """Send state to the service manager. address is `$NOTIFY_SOCKET`; empty means that nobody listens."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *lines: str) -> None:
        """Send assignments such as `READY=1`; a service manager that cannot be reached is no reason to stop."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            try:
                sock.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return


class Herald:
    """What the service manager hears over the life of one server. Times are seconds on a monotonic clock."""

    def __init__(self, notifier: Notifier, watchdog_s: float | None) -> None:
        """watchdog_s is how often to feed the watchdog, as `watchdog_interval_s` returns it."""
        self._notifier = notifier
        self._watchdog_s = watchdog_s
        self._fed_s = 0.0
        self._extended_s = 0.0
        self._status = ""
        self._is_ready = False
        self._is_stopping = False

    @property
    def grace_s(self) -> float:
        """How long before a silent process is given up the watchdog may go unfed.

        Two intervals: then systemd, which waits for four, acts one interval after the supervisor should have, at the
        earliest, however WatchdogSec and our own limits compare.
        """
        return (self._watchdog_s or 0.0) * 2

    def tell(self, status: str) -> None:
        """Say in one line what the server does, when that is news."""
        status = " ".join(status.split())[:_MAX_STATUS_CHARS]
        if status != self._status and not self._is_stopping:
            self._status = status
            self._notifier.send(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Say that requests are served."""
        self._is_ready = True
        self._status = status
        self._notifier.send("READY=1", f"STATUS={status}")

    def feed(self, now_s: float) -> None:
        """Feed the watchdog, as often as it wants; call it only while every loop turns."""
        if self._watchdog_s is not None and now_s - self._fed_s >= self._watchdog_s:
            self._notifier.send("WATCHDOG=1")
            self._fed_s = now_s

    def extend(self, now_s: float) -> None:
        """Ask for more time than TimeoutStartSec, because the start goes on."""
        if now_s - self._extended_s >= EXTEND_EVERY_S:
            self._notifier.send(f"EXTEND_TIMEOUT_USEC={_EXTEND_USEC}")
            self._extended_s = now_s

    def stopping(self, status: str, timeout_s: float) -> None:
        """Say that the server stops, and that this takes up to timeout_s, whatever TimeoutStopSec says."""
        self._is_stopping = True
        self._notifier.send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}")

    def reloading(self, now_s: float) -> None:
        """Say that settings are read again; `reloaded` follows. Before `ready` this is no news to systemd."""
        if self._is_ready and not self._is_stopping:
            self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={int(now_s * 1e6)}")

    def reloaded(self) -> None:
        """Say that this is over, whatever came of it."""
        if self._is_ready and not self._is_stopping:
            self._notifier.send("READY=1")


def watchdog_interval_s(environ: dict[str, str]) -> float | None:
    """Return how often to send `WATCHDOG=1` (a quarter of what systemd allows), or None without a watchdog."""
    usec = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 4_000_000
