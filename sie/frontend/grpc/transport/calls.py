"""Owns one call, which is one HTTP/2 stream, as the service sees it: who asks what, its messages, and its one end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Protocol

from sie.config.settings import Settings
from sie.frontend.grpc.transport.headers import CallHead, Method, status_block
from sie.frontend.grpc.transport.message_framing import Message, MessageReader
from sie.frontend.grpc.transport.status_codes import Status

_MESSAGE_BYTES: Final = 160
"""What a message takes beside its bytes while it is queued."""


class CallConnection(Protocol):
    """The connection of a call, as the call sees it (`sie.frontend.grpc.transport.connection.Connection`)."""

    @property
    def client(self) -> str:
        """Address and port of the client."""
        ...

    def took(self, call: Call) -> None:
        """Note that a queued message of the call was taken."""
        ...

    def answer(self, call: Call, message: bytes) -> None:
        """Send the only message of an answer, and its status OK."""
        ...

    def send(self, call: Call, message: bytes) -> None:
        """Send one of several messages, as far as the client has room."""
        ...

    def finish(self, call: Call, trailers: bytes) -> None:
        """Send the trailers, a header block, and forget the call."""
        ...


class Service(Protocol):
    """The methods behind the transport (`sie.frontend.grpc.app.Service`)."""

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        ...

    def find(self, path: str) -> Method | None:
        """Return the method that a path names, or None."""
        ...

    def begin(self, call: Call, message: Message) -> None:
        """Answer a call that has one message."""
        ...

    def begin_stream(self, call: Call) -> None:
        """Answer a call whose messages come one by one."""
        ...

    def end_streams(self) -> None:
        """Let every stream end once its requests are answered."""
        ...


class Unsent:
    """What a call has to send and could not yet."""

    __slots__ = ("ending", "num_bytes", "parts", "waiter")

    def __init__(self) -> None:
        self.parts: deque[memoryview] = deque()
        self.num_bytes = 0
        self.ending: bytes | None = None
        """The trailers that go out when all else has."""
        self.waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Return when all has gone out, or the call is over."""
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter

    def let_go(self) -> None:
        """Let who waits go on."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Incoming:
    """What has come of a call's messages, where that is not one whole message at once."""

    __slots__ = ("began_ns", "messages", "num_bytes", "num_held", "num_owed", "num_queued", "reader", "waiter")

    def __init__(self, max_bytes: int, now_ns: int) -> None:
        self.reader = MessageReader(max_bytes)
        self.messages: deque[Message] = deque()
        self.waiter: asyncio.Future[None] | None = None
        """Who waits for a message, or the end of them."""
        self.began_ns = now_ns
        """When the message began that is not there whole."""
        self.num_bytes = 0
        """Bytes of messages that came, their prefixes included."""
        self.num_queued = 0
        """Bytes of messages that nobody has taken, and of what keeps them."""
        self.num_held = 0
        """What the connection was told that is held here."""
        self.num_owed = 0
        """Bytes that came and that the client has not been told it may send anew."""

    def put(self, message: Message) -> None:
        """Queue a message that is there whole."""
        self.messages.append(message)
        self.num_queued += len(message.data) + _MESSAGE_BYTES

    def take(self) -> Message:
        """Return the first message of the queue."""
        message = self.messages.popleft()
        self.num_queued -= len(message.data) + _MESSAGE_BYTES
        return message


class Call:
    """One call until it is answered, left or refused.

    To the border of errors and figures it is what a request's scope and protocol are over HTTP.
    """

    __slots__ = (
        "_connection", "deadline_ns", "has_opened", "head", "headers", "incoming", "is_ended", "is_over", "is_stream", "metadata",
        "moved_ns", "path", "room", "rpc", "stream", "task", "unsent", "window",
    )  # fmt: skip
    method: Final = "POST"
    proto: Final = "grpc"

    def __init__(self, connection: CallConnection, stream: int, head: CallHead, window: int, room: int) -> None:
        self._connection = connection
        self.stream = stream
        self.head = head
        self.headers = head.headers
        self.path = head.path
        self.rpc = head.method
        """None where the path names no method."""
        self.is_stream = head.method is not None and head.method.is_stream
        self.window = window
        """Bytes that the client takes."""
        self.room = room
        """Bytes that the client may send."""
        self.deadline_ns = 0
        """When the client stops to wait, on CLOCK_MONOTONIC; 0 where it has not said."""
        self.moved_ns = 0
        """When a message that is not there whole last grew, or an answer that is not sent whole was last read; or 0."""
        self.task: asyncio.Task[None] | None = None
        self.incoming: Incoming | None = None
        self.unsent: Unsent | None = None
        self.metadata: Sequence[tuple[str, str]] = ()
        """What goes back in the trailers."""
        self.has_opened = False
        """Whether its answer's headers are sent."""
        self.is_ended = False
        """Whether the client sends no more."""
        self.is_over = False

    @property
    def client(self) -> str:
        """Who asks, `address:port`; few calls want to know."""
        return self._connection.client

    # --- messages in ----------------------------------------------------------------------------------------------

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the client sends until it sends no more. What is not taken here keeps the client from sending on."""
        incoming = self.incoming
        assert incoming is not None
        while True:
            while incoming.messages:
                message = incoming.take()
                if not self.is_over:
                    self._connection.took(self)
                yield message
            if self.is_ended or self.is_over:
                return
            incoming.waiter = asyncio.get_running_loop().create_future()
            await incoming.waiter

    def wake(self) -> None:
        """Let who waits for a message look again."""
        waiter = self.incoming.waiter if self.incoming is not None else None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- the answer -----------------------------------------------------------------------------------------------

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Have these come back with the status."""
        self.metadata = metadata

    def answer(self, message: bytes) -> None:
        """Send the only message, and that all is well."""
        if not self.is_over:
            self._connection.answer(self, message)

    async def write(self, message: bytes) -> None:
        """Send one of several messages; return when the client has room for another."""
        if self.is_over:
            return
        self._connection.send(self, message)
        if self.unsent is not None:
            await self.unsent.wait()

    def finish(self, status: Status = Status.OK, text: str = "") -> None:
        """End the call with a status; nothing happens to one that is over."""
        if not self.is_over:
            self._connection.finish(self, status_block(status, text, self.metadata))

    def leave(self) -> None:
        """End the work for a call that nobody waits for any more. Its connection has forgotten it."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()
        if self.unsent is not None:
            self.unsent.let_go()
        self.wake()

    def started(self, work: Any) -> None:
        """Run the work of this call."""
        self.task = asyncio.get_running_loop().create_task(work)
