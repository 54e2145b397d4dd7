"""Speaks sd_notify(3): readiness, status and the watchdog, when systemd started us; silent otherwise."""

from __future__ import annotations

import os
import socket


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


def watchdog_interval_s(environ: dict[str, str]) -> float | None:
    """Return how often to send `WATCHDOG=1` (half of what systemd allows), or None without a watchdog."""
    usec = environ.get("WATCHDOG_USEC", "")
    pid = environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2_000_000
