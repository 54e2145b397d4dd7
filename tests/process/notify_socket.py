"""A stand-in for the service manager: a notify socket that records what arrived and when."""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple, Self

from tests.process.harness import WAIT_S, eventually

_SO_TIMESTAMP = 29
"""The kernel notes when a datagram was sent: this process may read it late. Source: socket(7), asm-generic/socket.h."""
_TIMEVAL = struct.Struct("@ll")


class Note(NamedTuple):
    """One assignment; at_s is the Unix time, as log lines have it, at which it was sent."""

    at_s: float
    name: str
    value: str


class ServiceManager:
    """Listens on a notify socket for as long as it is entered; `env` is what a service is started with."""

    def __init__(self, watchdog_s: float = 0.0) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="sie-notify-")
        path = str(Path(self._directory.name, "notify"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self.env = {"NOTIFY_SOCKET": path}
        if watchdog_s:
            self.env["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        self.notes: list[Note] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"", self.env["NOTIFY_SOCKET"])
        self._thread.join(WAIT_S)
        self._socket.close()
        self._directory.cleanup()

    def named(self, name: str) -> list[Note]:
        """Return every assignment of this name so far."""
        return [note for note in list(self.notes) if note.name == name]

    def wait_for(self, name: str, part: str = "", timeout_s: float = WAIT_S, after_s: float = 0.0) -> Note:
        """Return the first assignment of name that came after after_s and holds part, waiting for it."""

        def found() -> Note | None:
            return next((note for note in self.named(name) if part in note.value and note.at_s > after_s), None)

        return eventually(found, f"{name} with {part!r} in {self.notes[-20:]}", timeout_s)

    def _listen(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMP, 1)
        while True:
            data, [(_, _, stamp)], _, _ = self._socket.recvmsg(65536, socket.CMSG_SPACE(_TIMEVAL.size))
            if not data:
                return
            seconds, microseconds = _TIMEVAL.unpack(stamp)
            sent_s = seconds + microseconds / 1e6
            self.notes += [Note(sent_s, *line.split("=", 1)) for line in data.decode().splitlines()]
