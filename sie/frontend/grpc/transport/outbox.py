"""Sends the answers of one connection as frames. Must never send more than the client's flow control windows allow.

An answer that fits is written at once, in one piece. Otherwise it is queued with its call and sent as the windows widen,
with the calls in turn. A call whose client reads nothing delays no other call.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterable
from typing import Final

from sie.frontend.grpc.transport.calls import Call, Unsent
from sie.frontend.grpc.transport.floods import SMALL_PART_BYTES, Allowance
from sie.frontend.grpc.transport.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_TABLE_BYTES,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_WINDOW,
    Code,
    ConnectionFault,
    StreamFault,
    frame,
)
from sie.frontend.grpc.transport.headers import GREETING, NO_TABLE, OK, OPENING
from sie.frontend.grpc.transport.message_framing import PREFIX, PREFIX_BYTES

_TURN_FRAMES: Final = 16
"""Frames of one call before the next call has its turn."""
_WHOLE: Final = struct.Struct(f">BHBBL{len(OPENING)}sBHBBLBL")
"""The headers of an answer, and the head of its only DATA frame."""
_END: Final = struct.Struct(f">BHBBL{len(OK)}s")


def _nowhere(_what: object) -> None: ...


class Outbox:
    """The output of one connection."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        allowance: Allowance,
        flush_later: Callable[[Outbox], None],
        on_held: Callable[[int], None],
        on_done: Callable[[Call], None],
    ) -> None:
        """Take the callbacks of the connection.

        flush_later calls `flush` after this iteration of the event loop. on_held gets the change of queued bytes. on_done
        is called when a call, including its status, is sent.
        """
        self._write_all: Callable[[Iterable[bytes | memoryview]], None] = transport.writelines
        self._write_one: Callable[[bytes], None] = transport.write
        self._allowance = allowance
        self._flush_later = flush_later
        self._fresh: list[bytes] = []
        self._on_held = on_held
        self._on_done = on_done
        self._window = DEFAULT_WINDOW
        self._max_frame = DEFAULT_FRAME_BYTES
        self._ready: dict[int, Call] = {}
        """Calls that wait for their turn or for the connection's window."""
        self._blocked: dict[int, Call] = {}
        """Calls that wait for their own window."""
        self._has_greeted = False
        self.initial_window = DEFAULT_WINDOW
        """The initial send window of a new call."""
        self.prefix = b""
        """The bytes that must start the next header block."""
        self.is_paused = False

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can be sent."""
        return self.is_paused or self._window <= 0

    def stop(self) -> None:
        """Send the queued frames, and discard all later ones."""
        self.flush()
        self._write_one = self._write_all = _nowhere

    def disconnect(self) -> None:
        """Drop all references to the lost connection."""
        self._write_one = self._write_all = self._flush_later = self._on_held = self._on_done = _nowhere

    def write(self, data: bytes) -> None:
        """Send frames after this iteration of the event loop, in one write.

        Each write wakes a client, and a client on the same cores would then run instead of this process.
        """
        self._fresh.append(data)
        if len(self._fresh) == 1:
            self._flush_later(self)

    def flush(self) -> None:
        """Send the frames of this iteration of the event loop."""
        fresh = self._fresh
        if fresh:
            self._fresh = []
            self._write_one(fresh[0] if len(fresh) == 1 else b"".join(fresh))

    # --- answers --------------------------------------------------------------------------------------------------

    def answer(self, call: Call, message: bytes, trailers: bytes) -> None:
        """Send the only message of a call and its status."""
        nbytes = len(message)
        size = nbytes + PREFIX_BYTES
        stream = call.stream
        if (
            size > self._max_frame or size > self._window or size > call.window or self.is_paused
            or not self._has_greeted or self.prefix
        ):  # fmt: skip
            self.send(call, message)
            self.end(call, trailers)
            return
        self._window -= size
        head = _WHOLE.pack(
            0, len(OPENING), HEADERS, END_HEADERS, stream, OPENING,
            size >> 16, size & 0xFFFF, DATA, 0, stream, 0, nbytes,
        )  # fmt: skip
        if trailers is OK:
            tail = _END.pack(0, len(OK), HEADERS, END_HEADERS | END_STREAM, stream, OK)
        else:
            tail = frame(HEADERS, END_HEADERS | END_STREAM, stream, trailers)
        self.write(b"".join((head, message, tail)))
        self._on_done(call)

    def send(self, call: Call, message: bytes) -> None:
        """Send one of several messages."""
        self._open(call)
        unsent = call.unsent
        if unsent is None:
            unsent = call.unsent = Unsent()
        size = PREFIX_BYTES + len(message)
        if len(message) <= DEFAULT_FRAME_BYTES:
            unsent.parts.append(memoryview(PREFIX.pack(0, len(message)) + message))
        else:
            unsent.parts.extend((memoryview(PREFIX.pack(0, len(message))), memoryview(message)))
        unsent.num_bytes += size
        self._on_held(size)
        if call.stream not in self._ready and call.stream not in self._blocked:
            call.moved_ns = time.monotonic_ns()
            self._queue(call)
            self.pump()

    def end(self, call: Call, trailers: bytes) -> None:
        """Send the status of a call, after its queued messages."""
        if call.unsent is not None:
            call.unsent.ending = trailers
            return
        opening = self._take_prefix() if call.has_opened else self._first_block()
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, call.stream, opening + trailers))
        self._on_done(call)

    def refuse(self, stream: int, block: bytes) -> None:
        """Send an answer that has only headers."""
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, self._take_prefix() + block))

    def drop(self, call: Call) -> None:
        """Discard the queued output of a call."""
        self._ready.pop(call.stream, None)
        self._blocked.pop(call.stream, None)
        if call.unsent is not None:
            self._on_held(-call.unsent.num_bytes)
            call.unsent.num_bytes = 0
            call.unsent.parts.clear()

    def _queue(self, call: Call) -> None:
        (self._ready if call.window > 0 else self._blocked)[call.stream] = call

    def _open(self, call: Call) -> None:
        if not call.has_opened:
            call.has_opened = True
            self.write(frame(HEADERS, END_HEADERS, call.stream, self._first_block()))

    def _first_block(self) -> bytes:
        opening = OPENING if self._has_greeted else GREETING
        self._has_greeted = True
        return self._take_prefix() + opening

    def _take_prefix(self) -> bytes:
        prefix, self.prefix = self.prefix, b""
        return prefix

    # --- windows --------------------------------------------------------------------------------------------------

    def settle(self, settings: dict[int, int], calls: list[Call]) -> None:
        """Apply the client's settings. Raises ConnectionFault if a window would become too large."""
        self._max_frame = settings.get(MAX_FRAME_SIZE, self._max_frame)
        if settings.get(HEADER_TABLE_SIZE, DEFAULT_TABLE_BYTES) < DEFAULT_TABLE_BYTES:
            self.prefix = NO_TABLE
        window = settings.get(INITIAL_WINDOW_SIZE, self.initial_window)
        grown = window - self.initial_window
        if not grown:
            return
        self.initial_window = window
        for call in calls:
            call.window += grown
            if call.window > MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a stream's window over 2^31-1")
            if self._blocked.pop(call.stream, None) is not None:
                self._queue(call)
        self.pump()

    def widen(self, num_bytes: int) -> None:
        """Widen the connection's send window. Raises ConnectionFault."""
        if not num_bytes:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE of 0")
        self._window += num_bytes
        if self._window > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "the connection's window is over 2^31-1")
        if self._ready:
            self.pump()

    def widen_call(self, call: Call, num_bytes: int) -> None:
        """Widen a call's send window. Raises StreamFault."""
        if not num_bytes:
            raise StreamFault(Code.PROTOCOL_ERROR)
        call.window += num_bytes
        if call.window > MAX_WINDOW:
            raise StreamFault(Code.FLOW_CONTROL_ERROR)
        if self._blocked.pop(call.stream, None) is not None:
            self._queue(call)
            self.pump()

    def pump(self) -> None:
        """Send as much as the windows allow, with the calls in turn."""
        ready = self._ready
        while ready and not self.is_paused and self._window > 0:
            stream = next(iter(ready))
            call = ready.pop(stream)
            unsent = call.unsent
            assert unsent is not None
            self._send_some(call, unsent)
            if unsent.parts:
                self._queue(call)
            else:
                self._sent_all(call, unsent)

    def _send_some(self, call: Call, unsent: Unsent) -> None:
        """Send up to _TURN_FRAMES frames of a call."""
        num_sent, num_small, parts = 0, 0, unsent.parts
        pieces: list[bytes | memoryview] = []
        for _ in range(_TURN_FRAMES):
            room = min(self._max_frame, self._window, call.window)
            if not parts or room <= 0:
                break
            part = parts.popleft()
            if len(part) > room:
                parts.appendleft(part[room:])
                part = part[:room]
                num_small += room < SMALL_PART_BYTES
            size = len(part)
            self._window -= size
            call.window -= size
            num_sent += size
            pieces += (HEAD.pack(size >> 16, size & 0xFFFF, DATA, 0, call.stream), part)
        if not pieces:
            return
        self.flush()
        self._write_all(pieces)
        self._allowance.num_sent += (len(pieces) >> 1) - num_small
        call.moved_ns = time.monotonic_ns()
        unsent.num_bytes -= num_sent
        self._on_held(-num_sent)

    def _sent_all(self, call: Call, unsent: Unsent) -> None:
        call.unsent = None
        call.moved_ns = 0
        if unsent.ending is not None:
            self.end(call, unsent.ending)
        unsent.wake()
