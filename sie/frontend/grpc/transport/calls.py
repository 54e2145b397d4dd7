"""Represents one call, an HTTP/2 stream, to the service: metadata, messages and status. Must end exactly once."""

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
"""Memory overhead of a queued message."""


class CallConnection(Protocol):
    """The connection of a call, as the call sees it (`sie.frontend.grpc.transport.connection.Connection`)."""

    @property
    def client(self) -> str:
        """Address and port of the client."""
        ...

    def turn(self) -> asyncio.Future[None] | None:
        """Return an awaitable to wait for before more work, or None if this turn of the event loop has time left."""
        ...

    def hold(self, num_bytes: int) -> None:
        """Count bytes that the connection holds; negative if released."""
        ...

    def on_taken(self, call: Call) -> None:
        """Record that a queued message of the call was taken."""
        ...

    def answer(self, call: Call, message: bytes) -> None:
        """Send the only message of an answer, and status OK."""
        ...

    def send(self, call: Call, message: bytes) -> None:
        """Send one of several messages, as far as the client's window allows."""
        ...

    def finish(self, call: Call, trailers: bytes) -> None:
        """Send the trailers, a header block, and remove the call."""
        ...


class Service(Protocol):
    """The methods behind the transport (`sie.frontend.grpc.app.Service`)."""

    @property
    def settings(self) -> Settings:
        """The current settings."""
        ...

    def find(self, path: str) -> Method | None:
        """Return the method that a path names, or None."""
        ...

    def begin(self, call: Call, message: Message) -> None:
        """Start to answer a call with one message."""
        ...

    def begin_stream(self, call: Call) -> None:
        """Start to answer a call with a stream of messages."""
        ...

    def end_streams(self) -> None:
        """End every stream after its received requests are answered."""
        ...


class Unsent:
    """The queued output of a call that flow control holds back."""

    __slots__ = ("ending", "num_bytes", "parts", "waiter")

    def __init__(self) -> None:
        self.parts: deque[memoryview] = deque()
        self.num_bytes = 0
        self.ending: bytes | None = None
        """The trailers to send after all messages."""
        self.waiter: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until all is sent or the call is over."""
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter

    def wake(self) -> None:
        """Wake the waiter."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Incoming:
    """The received messages of a call, unless it is one whole message in one frame."""

    __slots__ = ("began_ns", "messages", "num_bytes", "num_held", "num_owed", "num_queued", "reader", "waiter")

    def __init__(self, max_bytes: int, now_ns: int) -> None:
        self.reader = MessageReader(max_bytes)
        self.messages: deque[Message] = deque()
        self.waiter: asyncio.Future[None] | None = None
        """The waiter for the next message or the end of messages."""
        self.began_ns = now_ns
        """Start time of the incomplete message."""
        self.num_bytes = 0
        """Bytes received, including message prefixes."""
        self.num_queued = 0
        """Bytes of queued messages, including their overhead."""
        self.num_held = 0
        """The bytes that were last reported to the connection as held here."""
        self.num_owed = 0
        """Received bytes that no WINDOW_UPDATE has returned to the client yet."""

    def put(self, message: Message) -> None:
        """Queue a complete message."""
        self.messages.append(message)
        self.num_queued += len(message.data) + _MESSAGE_BYTES

    def take(self) -> Message:
        """Remove and return the first message of the queue."""
        message = self.messages.popleft()
        self.num_queued -= len(message.data) + _MESSAGE_BYTES
        return message


class Call:
    """One call until it is answered, cancelled or refused.

    For the error boundary and telemetry it replaces the scope and the protocol of an HTTP request.
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
        """The method of the path, or None if unknown."""
        self.is_stream = head.method is not None and head.method.is_stream
        self.window = window
        """Send window: bytes that the client accepts."""
        self.room = room
        """Receive window: bytes that the client may send."""
        self.deadline_ns = 0
        """The client's deadline on CLOCK_MONOTONIC, or 0 if it set none."""
        self.moved_ns = 0
        """Time of the last progress of an incomplete message or an unsent answer, or 0 without either."""
        self.task: asyncio.Task[None] | None = None
        self.incoming: Incoming | None = None
        self.unsent: Unsent | None = None
        self.metadata: Sequence[tuple[str, str]] = ()
        """Metadata for the trailers."""
        self.has_opened = False
        """Whether the headers of the answer were sent."""
        self.is_ended = False
        """Whether the client has finished sending."""
        self.is_over = False

    @property
    def client(self) -> str:
        """The client's `address:port`, computed when needed because few calls use it."""
        return self._connection.client

    # --- messages in ----------------------------------------------------------------------------------------------

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the client's messages until it finishes sending. Untaken messages stop the client from sending more."""
        incoming = self.incoming
        assert incoming is not None
        while True:
            while incoming.messages:
                turn = self._connection.turn()
                if turn is not None:
                    await turn
                message = incoming.take()
                if not self.is_over:
                    self._connection.on_taken(self)
                yield message
            if self.is_ended or self.is_over:
                return
            incoming.waiter = asyncio.get_running_loop().create_future()
            await incoming.waiter

    def wake(self) -> None:
        """Wake the waiter for messages."""
        waiter = self.incoming.waiter if self.incoming is not None else None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def hold(self, num_bytes: int) -> None:
        """Count bytes of a message while it is served; negative when it is answered."""
        self._connection.hold(num_bytes)

    # --- the answer -----------------------------------------------------------------------------------------------

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Set the metadata to send with the status."""
        self.metadata = metadata

    def answer(self, message: bytes) -> None:
        """Send the only message, and status OK."""
        if not self.is_over:
            self._connection.answer(self, message)

    async def write(self, message: bytes) -> None:
        """Send one of several messages. Returns when the client's window has accepted it."""
        if self.is_over:
            return
        self._connection.send(self, message)
        if self.unsent is not None:
            await self.unsent.wait()

    def finish(self, status: Status = Status.OK, text: str = "") -> None:
        """End the call with a status. Does nothing if the call is over."""
        if not self.is_over:
            self._connection.finish(self, status_block(status, text, self.metadata))

    def leave(self) -> None:
        """Cancel the work of a call whose connection has removed it."""
        self.is_over = True
        self.cancel_work()
        if self.unsent is not None:
            self.unsent.wake()
        self.wake()

    def cancel_work(self) -> None:
        """Cancel the task of this call, and drop it: a cancelled one keeps its traceback, which refers to the call."""
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    def start(self, work: Any) -> None:
        """Run the work of this call in a task."""
        self.task = asyncio.get_running_loop().create_task(work)
