"""A NATS of this process for unit tests: keeps what is stored and published, and breaks where a test says so."""

from __future__ import annotations

import time
from typing import Any

from sie.cluster.server_clock import ServerClock
from sie.values.errors import SieError, Unavailable


class FakeConnection:
    """Implements the part of `sie.cluster.connection.Connection` that holds no socket."""

    def __init__(self, skew_ns: int = 0) -> None:
        self.clock = ServerClock(time.monotonic_ns)
        now_ns = time.monotonic_ns()
        self.clock.measure(now_ns, now_ns, now_ns + skew_ns)
        self.is_connected = True
        self.stream: dict[int, tuple[str, bytes, str]] = {}
        """Stored messages by sequence number: subject, data and message id."""
        self.published: list[tuple[str, bytes]] = []
        self.objects: dict[str, bytes] = {}
        self.refuses: SieError | None = None
        """The error with which it refuses to store."""
        self._sequence = 0

    async def join_pool(self, pool: str) -> None:
        if not self.is_connected:
            raise Unavailable("no NATS")

    async def enqueue(self, pool: str, subject: str, data: bytes, message_id: str) -> int:
        if self.refuses is not None:
            raise self.refuses
        self._sequence += 1
        self.stream[self._sequence] = (subject, data, message_id)
        return self._sequence

    async def remove(self, pool: str, sequence: int) -> None:
        self.stream.pop(sequence, None)

    async def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self.published.append((subject, data))

    async def keep(self, pool: str, name: str, data: Any) -> str:
        self.objects[name] = bytes(data)
        return name

    async def fetch(self, pool: str, name: str) -> bytes:
        if name not in self.objects:
            raise Unavailable("it is gone")
        return self.objects[name]

    async def forget(self, pool: str, name: str) -> None:
        self.objects.pop(name, None)
