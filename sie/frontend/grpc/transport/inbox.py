"""Turns incoming frames into calls and messages. Must never let a client send more than its flow control window.

DATA payloads are read in pieces as they arrive. An untaken message of a call stops its client from sending more. Nearly
every call is one HEADERS frame and one DATA frame with one whole message, and has a fast path.
Source: RFC 9113, sections 5, 6.1, 6.2, 6.9 and 6.10; gRPC's PROTOCOL-HTTP2.
"""

from __future__ import annotations

from typing import Final, Protocol

from sie.config.grpc_limits import Grpc
from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.calls import Call, CallConnection, Incoming, Service
from sie.frontend.grpc.transport.floods import SMALL_PART_BYTES, TINY_MESSAGE_BYTES, Allowance
from sie.frontend.grpc.transport.frames import END_HEADERS, END_STREAM, PADDED, Code, ConnectionFault, StreamFault
from sie.frontend.grpc.transport.headers import CODINGS, HeaderReader, refusal_block
from sie.frontend.grpc.transport.message_framing import PREFIX, PREFIX_BYTES, BadPrefix, Message, TooLarge
from sie.frontend.grpc.transport.outbox import Outbox
from sie.frontend.grpc.transport.status_codes import Status
from sie.frontend.grpc.transport.turns import CALL_NS, Turns

_WINDOWS: Final = 4
"""The window of a connection, as a multiple of a stream's window."""
_MAX_CONTINUATIONS: Final = 64
_MAX_GONE: Final = 256
_PIECE_BYTES: Final = 4096
"""Largest piece that may hold many messages."""
_STREAM_BYTES: Final = 32_768
"""Memory that a stream counts for, besides its messages: its tasks, and the data of one request."""


class InboxConnection(CallConnection, Protocol):
    """The methods of the connection that its inbox uses."""

    def on_left(self) -> None:
        """Close a draining connection if it has no call left."""
        ...


class InboxListener(Protocol):
    """The fields of the listener that an inbox uses: the service and the current limits."""

    @property
    def service(self) -> Service: ...

    @property
    def limits(self) -> Grpc: ...

    @property
    def max_message_bytes(self) -> int: ...

    @property
    def turns(self) -> Turns: ...


class Inbox:
    """The input of one connection, and its open calls."""

    def __init__(
        self,
        connection: InboxConnection,
        listener: InboxListener,
        outbox: Outbox,
        allowance: Allowance,
    ) -> None:
        self._connection = connection
        self._listener = listener
        self._service = listener.service
        self._limits = listener.limits
        self._outbox = outbox
        self._write = outbox.write
        self._allowance = allowance
        self._turns = listener.turns
        limits = self._limits
        self._headers = HeaderReader(
            limits.max_grpc_metadata_bytes, limits.max_grpc_metadata_entries, self._service.find, allowance.spend
        )
        self._room = self.window = _WINDOWS * self._limits.grpc_window_bytes
        self._gone: dict[int, None] = {}
        self._block: list[bytes] = []
        self._block_flags = 0
        self._left = 0
        self._padding = 0
        self._call: Call | None = None
        self._is_end = self._is_small = False
        self.calls: dict[int, Call] = {}
        self.last_stream = 0
        self.final_stream = frames.MAX_WINDOW
        """The last stream that is accepted; calls on higher streams are refused."""
        self.block_stream = 0
        """The stream whose header block is incomplete, or 0."""
        self.block_ns = 0
        """Start time of that block."""
        self.now_ns = 0
        """Arrival time of the current bytes."""

    @property
    def is_within(self) -> bool:
        """Whether the next bytes belong to an incomplete frame."""
        return self._left > 0 or self._padding > 0

    # --- messages -------------------------------------------------------------------------------------------------

    def on_data(self, data: bytes, at: int, end: int, flags: int, stream: int) -> int:
        """Handle DATA with its payload at data[at:end], perhaps incomplete. Return the end of the consumed bytes."""
        length = end - at
        self._room -= length
        if self._room < self.window >> 1:
            self._renew_window()
        call = self.calls.get(stream)
        if call is None or call.is_ended:
            return self._on_stray(call, stream, at, length)
        if flags == END_STREAM and end <= len(data) and call.incoming is None and length >= PREFIX_BYTES:
            packed, nbytes = PREFIX.unpack_from(data, at)
            if (
                nbytes == length - PREFIX_BYTES and packed < 2 and call.head.content_length < 0
                and nbytes <= self._listener.max_message_bytes
            ):  # fmt: skip
                call.is_ended = True
                call.moved_ns = 0
                self._turns.end_ns -= CALL_NS
                self._service.begin(call, Message(packed == 1, data[at + PREFIX_BYTES : end]))
                return end
        return self._begin_payload(call, data, at, length, flags)

    def _renew_window(self) -> None:
        if self._room < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        self._write(frames.window_frame(0, self.window - self._room))
        self._room = self.window

    def _begin_payload(self, call: Call, data: bytes, at: int, length: int, flags: int) -> int:
        """Prepare for a payload in pieces. Return the start of the first piece."""
        padding = 0
        if flags & PADDED:
            padding = data[at] + 1 if length else 1
            if padding > length:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "padding beyond its frame")
            at += 1
        call.room -= length
        if call.room < 0:
            self.skip(length - 1 if flags & PADDED else length)
            self.reset(call, Code.FLOW_CONTROL_ERROR)
            return at
        self._call, self._is_end = call, bool(flags & END_STREAM)
        self._left, self._padding = length - padding, max(0, padding - 1)
        self._is_small = length - padding < SMALL_PART_BYTES and not self._is_end
        self._incoming(call).num_owed += padding
        if not self._left:
            self._on_piece(call, b"", is_last=True)
        return at

    def skip(self, num_bytes: int) -> None:
        """Ignore the next num_bytes."""
        self._padding = num_bytes

    def _on_stray(self, call: Call | None, stream: int, at: int, length: int) -> int:
        """Skip DATA of a stream that is not open. DATA of a stream that we reset may still arrive."""
        self.skip(length)
        if call is not None:
            self.reset(call, Code.STREAM_CLOSED)
        elif stream not in self._gone:
            self.check_opened(stream, "DATA")
            self._allowance.spend()
            self._write(frames.reset_frame(stream, Code.STREAM_CLOSED))
        elif not length:
            self._allowance.spend()
        return at

    def read_piece(self, data: bytes, at: int, size: int) -> int:
        """Read a part of the available payload, and skip its padding. Return the end of the consumed bytes.

        A part ends soon after the message that it continues, because the rest may be very many messages.
        """
        if self._left:
            call = self._call
            missing = call.incoming.reader.num_missing if call is not None and call.incoming is not None else 0
            end = min(size, at + self._left, at + max(missing, _PIECE_BYTES))
            self._left -= end - at
            if call is not None and end > at:
                self._on_piece(call, memoryview(data)[at:end], is_last=not self._left)
            at = end
        if not self._left:
            end = min(size, at + self._padding)
            self._padding -= end - at
            at = end
        return at

    def _incoming(self, call: Call) -> Incoming:
        if call.incoming is None:
            call.incoming = Incoming(self._listener.max_message_bytes, self.now_ns)
        return call.incoming

    def _on_piece(self, call: Call, piece: bytes | memoryview, *, is_last: bool) -> None:
        """Pass a piece of messages to a call. is_last: the frame ends here."""
        if call.is_over:
            return
        incoming = self._incoming(call)
        try:
            found = incoming.reader.feed(piece)
        except TooLarge as error:
            most = self._listener.max_message_bytes
            text = f"Received message larger than max ({error.num_bytes} vs. {most}, max_grpc_message_bytes)"
            call.finish(Status.RESOURCE_EXHAUSTED, text)
            return
        except BadPrefix:
            call.finish(Status.INTERNAL, "a message has an invalid prefix")
            return
        incoming.num_bytes += len(piece)
        incoming.num_owed += len(piece)
        if is_last and self._is_small and not found:
            self._allowance.spend()
        self._on_messages(call, incoming, found)
        if call.is_over:
            return
        if is_last and self._is_end:
            self._on_ended(call)
        else:
            self.take_more(call)

    def _on_messages(self, call: Call, incoming: Incoming, found: list[Message]) -> None:
        """Queue complete messages, and record the progress of an incomplete one."""
        num_tiny = 0
        for message in found:
            incoming.put(message)
            num_tiny += len(message.data) < TINY_MESSAGE_BYTES
        if num_tiny and call.is_stream:
            self._allowance.spend(num_tiny)
        is_waiting = call.is_stream and incoming.reader.is_between
        if found or not call.moved_ns:
            incoming.began_ns = self.now_ns
        call.moved_ns = 0 if is_waiting else self.now_ns
        self.account(incoming)
        if call.is_stream:
            call.wake()
        elif len(incoming.messages) > 1:
            call.finish(Status.UNIMPLEMENTED, "the method takes one message, and there are more")

    def _on_ended(self, call: Call) -> None:
        """Handle the end of a client's messages."""
        call.is_ended = True
        call.moved_ns = 0
        incoming = self._incoming(call)
        if call.head.content_length not in (-1, incoming.num_bytes):
            self.reset(call, Code.PROTOCOL_ERROR)
        elif not incoming.reader.is_between:
            call.finish(Status.INTERNAL, "the last message is cut short")
        elif call.is_stream:
            call.wake()
        elif incoming.messages:
            message = incoming.take()
            self.account(incoming)
            self._turns.end_ns -= CALL_NS
            self._service.begin(call, message)
        else:
            call.finish(Status.UNIMPLEMENTED, "the method takes one message, and there is none")

    def on_taken(self, call: Call) -> None:
        """Record that a message of a stream was taken. The client may send more when none is queued."""
        incoming = call.incoming
        if incoming is not None and not call.is_over:
            self.account(incoming)
            self.take_more(call)

    def take_more(self, call: Call) -> None:
        """Widen a call's receive window if over half of it is used and no message is queued."""
        incoming = call.incoming
        if incoming is None or call.is_ended or (incoming.messages and call.is_stream):
            return
        if incoming.num_owed > self._limits.grpc_window_bytes >> 1:
            call.room += incoming.num_owed
            self._write(frames.window_frame(call.stream, incoming.num_owed))
            incoming.num_owed = 0

    def account(self, incoming: Incoming, *, is_over: bool = False) -> None:
        """Report to the connection the bytes of untaken messages that a call holds."""
        held = 0 if is_over else incoming.reader.num_held + incoming.num_queued
        if held != incoming.num_held:
            self._connection.hold(held - incoming.num_held)
            incoming.num_held = held

    # --- headers --------------------------------------------------------------------------------------------------

    def on_headers(self, flags: int, stream: int, payload: bytes) -> None:
        """Handle HEADERS. Raises ConnectionFault."""
        if not stream & 1:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "HEADERS on a stream that a client cannot open")
        if flags & (PADDED | frames.HAS_PRIORITY):
            payload = frames.strip_padding(flags, payload)
        if flags & END_HEADERS:
            self._on_block(stream, payload, is_end=bool(flags & END_STREAM))
        else:
            self.block_stream, self.block_ns = stream, self.now_ns
            self._block_flags, self._block = flags, [payload]

    def on_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        """Handle CONTINUATION. Raises ConnectionFault."""
        if not self.block_stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._allowance.spend()
        self._block.append(payload)
        num_bytes = sum(map(len, self._block))
        if len(self._block) > _MAX_CONTINUATIONS or num_bytes > 2 * self._limits.max_grpc_metadata_bytes:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "headers in too many pieces")
        if flags & END_HEADERS:
            block, self._block, self.block_stream = b"".join(self._block), [], 0
            self._on_block(stream, block, is_end=bool(self._block_flags & END_STREAM))

    def _on_block(self, stream: int, block: bytes, *, is_end: bool) -> None:
        call = self.calls.get(stream)
        if call is None and stream > self.last_stream:
            self.last_stream = stream
            self._open(stream, block, is_end=is_end)
            return
        self._headers.decode(block)
        if call is None:
            if stream not in self._gone:
                raise ConnectionFault(Code.STREAM_CLOSED, "HEADERS on a stream that is closed")
        elif call.is_ended or not is_end:
            self.reset(call, Code.STREAM_CLOSED if call.is_ended else Code.PROTOCOL_ERROR)
        else:
            self._on_ended(call)

    def _open(self, stream: int, block: bytes, *, is_end: bool) -> None:
        """Open a call, or refuse it. Raises ConnectionFault if the header table is lost."""
        try:
            head = self._headers.read(block)
        except StreamFault as fault:
            self._refuse(stream, fault.code)
            return
        limits = self._limits
        if stream > self.final_stream or len(self.calls) >= limits.max_grpc_streams:
            self._refuse(stream, Code.REFUSED_STREAM)
            return
        if head.refusal:
            self._outbox.refuse(stream, refusal_block(head.refusal))
            self._refuse(stream, Code.NO_ERROR)
            return
        call = Call(self._connection, stream, head, self._outbox.initial_window, limits.grpc_window_bytes)
        self.calls[stream] = call
        call.is_ended = is_end
        call.moved_ns = now_ns = self.now_ns
        if head.timeout_ns:
            call.deadline_ns = now_ns + head.timeout_ns
        if not head.is_plain:
            self._refuse_call(call)
        elif call.is_stream:
            call.moved_ns = 0
            incoming = self._incoming(call)
            incoming.num_queued = _STREAM_BYTES
            self.account(incoming)
            self._turns.end_ns -= CALL_NS
            self._service.begin_stream(call)
        if is_end and not call.is_over:
            self._on_ended(call)

    def _refuse_call(self, call: Call) -> None:
        """Finish a call that cannot be served; leave any other call unchanged."""
        head = call.head
        if head.is_too_large:
            call.finish(Status.RESOURCE_EXHAUSTED, "the call's metadata is larger than max_grpc_metadata_bytes")
        elif call.rpc is None:
            call.finish(Status.UNIMPLEMENTED, "Method not found!")
        elif head.problem:
            call.finish(Status.INVALID_ARGUMENT, head.problem)
        elif head.coding not in CODINGS:
            call.finish(Status.UNIMPLEMENTED, f"grpc-encoding {head.coding[:32]!r} is not supported")

    def _refuse(self, stream: int, code: Code) -> None:
        self._allowance.spend()
        self._remember(stream)
        self._write(frames.reset_frame(stream, code))

    # --- ends -----------------------------------------------------------------------------------------------------

    def on_reset(self, stream: int) -> None:
        """Cancel a call that its client has reset."""
        self.check_opened(stream, "RST_STREAM")
        call = self.calls.get(stream)
        if call is not None:
            self.forget(call)

    def check_opened(self, stream: int, kind: str) -> None:
        """Raise ConnectionFault for a frame of a stream that was never opened."""
        if not stream & 1 or stream > self.last_stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"{kind} on a stream that was never opened")

    def on_sent(self, call: Call) -> None:
        """Remove a call that is completely sent. Reset its stream if the client has not finished sending."""
        call.is_over = True
        del self.calls[call.stream]
        if call.incoming is not None:
            self.account(call.incoming, is_over=True)
            call.wake()
        if not call.is_ended:
            self._remember(call.stream)
            self._write(frames.reset_frame(call.stream, Code.NO_ERROR))

    def reset(self, call: Call, code: Code) -> None:
        """End a call without an answer."""
        self._allowance.spend()
        self._remember(call.stream)
        self._write(frames.reset_frame(call.stream, code))
        self.forget(call)

    def _remember(self, stream: int) -> None:
        """Remember a reset stream for a while, because its frames may still arrive."""
        self._gone[stream] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def remove(self, call: Call) -> None:
        """Remove a call, whose work its caller cancels."""
        call.is_over = True
        del self.calls[call.stream]
        self._outbox.drop(call)
        if call.incoming is not None:
            self.account(call.incoming, is_over=True)

    def forget(self, call: Call) -> None:
        """Remove and cancel a call."""
        self.remove(call)
        self._turns.end_ns -= CALL_NS
        call.leave()
        self._connection.on_left()
