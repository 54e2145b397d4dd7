"""Listens for gRPC connections, limits their memory and drains them. Must not start a timer for each call.

One periodic check finds all stalled connections and calls.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from typing import Final

from sie.config.grpc_limits import Grpc
from sie.config.settings import Settings
from sie.frontend.grpc.transport.calls import Call, Service
from sie.frontend.grpc.transport.connection import Connection
from sie.frontend.grpc.transport.outbox import Outbox
from sie.frontend.grpc.transport.status_codes import Status
from sie.frontend.grpc.transport.turns import Turns
from sie.runtime import child_setup
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
_CHECK_S: Final = 0.25
_GRACE_NS: Final = 100_000_000
"""Extra time for a call that ends at its deadline by itself."""
_LINGER_NS: Final = 2_000_000_000
"""Time for a client to read the reason of a closed connection."""
_HEARD_S: Final = 1.0
"""Time for clients to learn that no more calls are accepted."""
_HANDSHAKE_S: Final = 10.0


class Listener:
    """The connections of one process."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self.service = service
        self.connections: set[Connection] = set()
        self.turns = Turns()
        self.linger_ns = _LINGER_NS
        self.on_ended: Callable[[str], None] = lambda _: None
        """Called with the reason for each connection that this side ends early."""
        self.on_checked: Callable[[int, int], None] = lambda _connections, _waits: None
        """Called several times a second with the numbers of open connections and of waits since the last call."""
        self._unflushed: list[Outbox] = []
        self.held_bytes = 0
        """The bytes that all connections hold."""
        self._is_cutting = False
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self.reconfigure(settings)

    def reconfigure(self, settings: Settings) -> None:
        """Apply reloaded limits. Open connections keep their windows."""
        self._settings = settings
        self.limits: Grpc = settings.grpc
        self.max_message_bytes = settings.limits.max_grpc_message_bytes
        self.idle_ns = int(settings.limits.body_idle_timeout_s * 1e9)
        self.unread_ns = int(settings.grpc.grpc_unread_timeout_s * 1e9)
        self.max_connections = child_setup.max_connections(settings.grpc.max_grpc_connections)
        self._min_bytes_per_s = settings.limits.min_body_bytes_per_s
        self.turns.turn_ns = int(settings.grpc.grpc_turn_ms * 1e6)

    async def open(self, host: str, port: int, backlog: int, tls: ssl.SSLContext | None) -> None:
        """Listen. Raises OSError if the address is in use."""
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the supervisor also holds the port
            sock.bind((host, port))
            loop = asyncio.get_running_loop()
            handshake_s = _HANDSHAKE_S if tls is not None else None
            self._server = await loop.create_server(
                lambda: Connection(self), sock=sock, backlog=backlog, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        except BaseException:
            sock.close()
            raise
        self._timer = loop.call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)
        settings = self.service.settings
        if settings is not self._settings:
            self.reconfigure(settings)
        self.on_checked(len(self.connections), self.turns.take_num_waits())
        self._check_some(list(self.connections))

    def _check_some(self, connections: list[Connection]) -> None:
        """Check connections for at most the time of a turn, and the rest in the next iteration of the event loop."""
        now_ns = time.monotonic_ns()
        while connections and time.monotonic_ns() - now_ns <= self.turns.turn_ns:
            connection = connections.pop()
            if connection in self.connections:  # it may be lost since the last part of this check
                connection.check(now_ns)
        if connections:
            asyncio.get_running_loop().call_soon(self._check_some, connections)

    def fault_of(self, call: Call, now_ns: int) -> tuple[Status, str] | None:
        """Return the status for a call that has stalled or is past its deadline, or None."""
        if call.deadline_ns and now_ns > call.deadline_ns + _GRACE_NS:
            return Status.DEADLINE_EXCEEDED, "Deadline Exceeded"
        if not call.moved_ns:
            return None
        if call.unsent is not None:
            return (Status.CANCELLED, "the answer was not read") if now_ns - call.moved_ns > self.unread_ns else None
        is_slow = now_ns - call.moved_ns > self.idle_ns
        if call.incoming is not None and not is_slow:
            elapsed_ns = now_ns - call.incoming.began_ns
            is_slow = elapsed_ns > self.idle_ns and call.incoming.num_held < self._min_bytes_per_s * elapsed_ns / 1e9
        text = "the message came too slowly (body_idle_timeout_s, min_body_bytes_per_s)"
        return (Status.DEADLINE_EXCEEDED, text) if is_slow else None

    # --- output ---------------------------------------------------------------------------------------------------

    def flush_later(self, outbox: Outbox) -> None:
        """Flush an outbox after this iteration of the event loop."""
        self._unflushed.append(outbox)
        if len(self._unflushed) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for outbox in unflushed:
            outbox.flush()

    # --- memory ---------------------------------------------------------------------------------------------------

    def hold(self, num_bytes: int) -> None:
        """Count held bytes of a connection; negative if released. Over the limit, the largest holder is cut."""
        self.held_bytes += num_bytes
        if self.held_bytes > self.limits.max_grpc_held_bytes and not self._is_cutting:
            self._is_cutting = True
            asyncio.get_running_loop().call_soon(self._cut)

    def _cut(self) -> None:
        self._is_cutting = False
        if self.held_bytes > self.limits.max_grpc_held_bytes and self.connections:
            largest = max(self.connections, key=lambda connection: connection.held_bytes)
            _log.warning("max_grpc_held_bytes: cutting a connection that holds %d bytes", largest.held_bytes)
            largest.abort()
            self.on_ended("memory")

    # --- the end --------------------------------------------------------------------------------------------------

    def on_lost(self, connection: Connection) -> None:
        """Remove a lost connection."""
        self.connections.discard(connection)
        if not self.connections:
            self._gone.set()

    async def close(self, grace_s: float) -> None:
        """Accept no more connections and calls. Returns when the open ones have ended, or after grace_s."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._wait_gone(_HEARD_S)
                for connection in list(self.connections):
                    connection.finish_drain()
                await self._wait_gone(None)
        except TimeoutError:
            _log.warning("drain_timeout_s has passed: cutting %d connections", len(self.connections))
        for connection in list(self.connections):
            connection.abort()
        if self._timer is not None:
            self._timer.cancel()

    async def _wait_gone(self, timeout_s: float | None) -> None:
        self._gone.clear()
        if not self.connections:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._gone.wait()
        except TimeoutError:
            if timeout_s is None:
                raise
