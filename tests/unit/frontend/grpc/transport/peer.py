"""A connection without a socket: a client's bytes go in, the bytes it would receive come out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from sie.config.grpc_limits import Grpc
from sie.config.limits import Limits
from sie.config.settings import Settings
from sie.frontend.grpc.app import Service
from sie.frontend.grpc.methods import METHODS, Method
from sie.frontend.grpc.transport.calls import Call
from sie.frontend.grpc.transport.connection import Connection
from sie.frontend.grpc.transport.listener import Listener
from sie.frontend.grpc.transport.message_framing import Message
from sie.frontend.grpc.transport.outbox import Outbox
from tests.unit.frontend.grpc.transport.client_bytes import OPENING, split_frames

UNARY = next(method for method in METHODS if method.name == "ModelInfer")
STREAM = next(method for method in METHODS if method.name == "ModelStreamInfer")


class EchoService:
    """Answers a call with its message, at once or when told to."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.is_slow = False
        self.begun: list[tuple[Call, Message]] = []
        self.streams: list[Call] = []

    def find(self, path: str) -> Method:
        return {UNARY.route.template: UNARY, STREAM.route.template: STREAM}.get(path)

    def begin(self, call: Call, message: Message) -> None:
        self.begun.append((call, message))
        if not self.is_slow:
            call.answer(message.data)

    def begin_stream(self, call: Call) -> None:
        self.streams.append(call)


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.num_buffered = 0
        self.is_closed = self.is_cut = self.is_reading_paused = False

    def write(self, data: Any) -> None:
        assert not self.is_closed, "written after the end"
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.num_buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 5) if name == "peername" else default

    def pause_reading(self) -> None:
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        self.is_reading_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_cut = True


class ListenerOfTests(Listener):
    """A listener without an event loop, whose turns end when a peer says so."""

    def __init__(self, service: EchoService, settings: Settings) -> None:
        super().__init__(cast("Service", service), settings)
        self.later: list[Callable[[], None]] = []
        self.turns.call_soon = self.later.append

    def flush_later(self, outbox: Outbox) -> None:
        outbox.flush()


class Peer:
    """A client of one connection of its own listener."""

    def __init__(
        self, grpc: Grpc | None = None, limits: Limits | None = None, listener: ListenerOfTests | None = None
    ) -> None:
        settings = Settings(grpc=grpc or Grpc(), limits=limits or Limits())
        self.service = EchoService(settings)
        self.listener = listener or ListenerOfTests(self.service, settings)
        self.transport = FakeTransport()
        self.connection = Connection(self.listener)
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> list[tuple[int, int, int, bytes]]:
        """Send bytes; return the frames that come back for them: kind, flags, stream, payload."""
        start = len(self.transport.written)
        if not self.transport.is_closed:
            self.receive(data)
        return split_frames(bytes(self.transport.written[start:]))

    def receive(self, data: bytes) -> None:
        """Have the connection receive bytes, in as many turns as it takes."""
        self.connection.data_received(data)
        while self.listener.later:
            self.listener.later.pop(0)()

    def opened(self) -> Peer:
        """Greet, and take in the greeting."""
        self.send(OPENING)
        return self
