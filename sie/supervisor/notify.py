"""Sends sd_notify(3) messages: readiness, status, watchdog and timeout extensions. Does nothing without systemd.

`Notifier` sends; `SystemdReporter` decides what to send and when. Neither ever waits.
"""

from __future__ import annotations

import os
import socket

EXTEND_EVERY_S = 5.0
_EXTEND_USEC = 30_000_000
"""The extension of each request: long enough for a busy host to miss a few iterations."""
_MAX_STATUS_CHARS = 1024


class Notifier:
    """Sends state to the service manager. address is `$NOTIFY_SOCKET`; empty without a service manager."""

    def __init__(self, address: str) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def send(self, *lines: str) -> None:
        """Send assignments such as `READY=1`. An unreachable service manager is ignored."""
        if not self._address:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            try:
                sock.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return


class SystemdReporter:
    """Reports the life of one server to systemd. Times are seconds on a monotonic clock."""

    def __init__(self, notifier: Notifier, watchdog_s: float | None) -> None:
        """watchdog_s is the interval for feeding the watchdog, as `watchdog_interval_s` returns it."""
        self._notifier = notifier
        self._watchdog_s = watchdog_s
        self._fed_s = 0.0
        self._extended_s = 0.0
        self._status = ""
        self._is_ready = False
        self._is_stopping = False

    @property
    def grace_s(self) -> float:
        """How long before the kill of a hung process the supervisor stops feeding the watchdog: two intervals.

        systemd waits for four intervals. So systemd acts at least one interval after the supervisor should have acted,
        for any values of WatchdogSec and of our own limits.
        """
        return (self._watchdog_s or 0.0) * 2

    def set_status(self, status: str) -> None:
        """Send a one-line status if it has changed."""
        status = " ".join(status.split())[:_MAX_STATUS_CHARS]
        if status != self._status and not self._is_stopping:
            self._status = status
            self._notifier.send(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Report that the server serves requests."""
        self._is_ready = True
        self._status = status
        self._notifier.send("READY=1", f"STATUS={status}")

    def feed_watchdog(self, now_s: float) -> None:
        """Feed the watchdog once per interval. Call it only while every event loop runs."""
        if self._watchdog_s is not None and now_s - self._fed_s >= self._watchdog_s:
            self._notifier.send("WATCHDOG=1")
            self._fed_s = now_s

    def extend_timeout(self, now_s: float) -> None:
        """Ask for more time than TimeoutStartSec, because the start makes progress."""
        if now_s - self._extended_s >= EXTEND_EVERY_S:
            self._notifier.send(f"EXTEND_TIMEOUT_USEC={_EXTEND_USEC}")
            self._extended_s = now_s

    def stopping(self, status: str, timeout_s: float) -> None:
        """Report that the server stops and needs up to timeout_s, regardless of TimeoutStopSec."""
        self._is_stopping = True
        self._notifier.send("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(timeout_s * 1e6)}")

    def reloading(self, now_s: float) -> None:
        """Report that settings are read again; `reloaded` must follow. Does nothing before `ready`."""
        if self._is_ready and not self._is_stopping:
            self._notifier.send("RELOADING=1", f"MONOTONIC_USEC={int(now_s * 1e6)}")

    def reloaded(self) -> None:
        """Report that the reload has ended, whatever its outcome."""
        if self._is_ready and not self._is_stopping:
            self._notifier.send("READY=1")


def open_reporter(environ: dict[str, str]) -> SystemdReporter:
    """Return the reporter for the service manager that the environment names, or one that reports to nobody."""
    return SystemdReporter(Notifier(environ.get("NOTIFY_SOCKET", "")), watchdog_interval_s(environ))


def watchdog_interval_s(environ: dict[str, str]) -> float | None:
    """Return how often to send `WATCHDOG=1` (a quarter of systemd's limit), or None without a watchdog."""
    usec = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 4_000_000
