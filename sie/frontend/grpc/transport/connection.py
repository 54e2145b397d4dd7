"""Runs one HTTP/2 connection: socket, frames and shutdown. No exception may leave `data_received`, for any input.

A protocol error ends the stream (RST_STREAM) or the connection (GOAWAY). DATA passes to the inbox in pieces as it arrives,
and every other frame to `control_frames` when it is complete. Source: RFC 9113, sections 3.4, 4 and 6.8.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.calls import Call
from sie.frontend.grpc.transport.control_frames import MAX_FRAME_BYTES, ControlFrames
from sie.frontend.grpc.transport.floods import Allowance
from sie.frontend.grpc.transport.frames import (
    DATA,
    HEAD,
    HEAD_BYTES,
    PADDED,
    PREFACE,
    STREAM_MASK,
    Code,
    ConnectionFault,
)
from sie.frontend.grpc.transport.headers import OK, status_block
from sie.frontend.grpc.transport.inbox import Inbox, InboxListener
from sie.frontend.grpc.transport.outbox import Outbox
from sie.frontend.grpc.transport.status_codes import Status
from sie.frontend.grpc.transport.turns import CALL_NS, Share
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
_WRITE_AHEAD_BYTES: Final = 1 << 20
"""Write buffer of the socket; above this size writing pauses."""
_READ_AHEAD_BYTES: Final = 1 << 16
"""Bytes of a waiting connection; above this size reading pauses."""
_FREE_FRAMES: Final = 2
"""Frames that are handled before the clock is read: one call, which is nearly always all of the received bytes."""
_ESTABLISHED: Final = b"\x01"
"""The state of a TCP connection that neither side has closed."""
_TEXT: Final = b"This port speaks gRPC, which is HTTP/2, and nothing else.\n"
_NOT_HTTP2: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    % (len(_TEXT), _TEXT)
)  # fmt: skip


class ConnectionListener(InboxListener, Protocol):
    """The methods of `sie.frontend.grpc.transport.listener.Listener` that a connection uses."""

    connections: set[Connection]
    on_ended: Callable[[str], None]
    max_connections: int
    linger_ns: int
    idle_ns: int
    unread_ns: int

    def flush_later(self, outbox: Outbox) -> None:
        """Flush an outbox after this iteration of the event loop."""
        ...

    def hold(self, num_bytes: int) -> None:
        """Add to the bytes that this connection holds. A negative number releases bytes."""
        ...

    def on_lost(self, connection: Connection) -> None:
        """Remove a lost connection."""
        ...

    def fault_of(self, call: Call, now_ns: int) -> tuple[Status, str] | None:
        """Return the status for a call that has stalled or is past its deadline, or None."""
        ...


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, listener: ConnectionListener) -> None:
        self._listener = listener
        self._rest = b""
        self._turns = listener.turns
        self._share = Share()
        self._is_waiting = self._is_reading_paused = False
        self._num_kept = 0
        self._has_greeted = self._is_over = self._is_draining = False
        self._allowance = Allowance(listener.limits.max_grpc_idle_frames_per_s)
        self.opened_ns = time.monotonic_ns()
        self.held_bytes = 0
        """Bytes of messages that are incomplete, queued, being served or unsent."""
        self._num_written = 0
        self.closing_ns = 0
        """Time when closing started, or 0."""
        self.paused_ns = 0
        """Time since when the socket's buffer is full, or 0."""

    # --- the socket -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the connection up and register it."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_AHEAD_BYTES)
        self._outbox = Outbox(self._transport, self._allowance, self._listener.flush_later, self.hold, self._on_sent)
        self._inbox = Inbox(self, self._listener, self._outbox, self._allowance)
        self._control = ControlFrames(self, self._inbox, self._outbox, self._allowance, self._listener)
        self._listener.connections.add(self)
        if len(self._listener.connections) > self._listener.max_connections:
            self._listener.on_ended("connections")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work of every call, and unregister."""
        self._is_over = True
        self._rest = b""
        self._set_reading()
        self._drop_calls()
        self._hold_written(0)
        self._outbox.disconnect()
        self._listener.on_lost(self)
        del self._inbox, self._control  # breaks reference cycles; the garbage collector runs rarely

    def pause_writing(self) -> None:
        """Hold back answers, and stop reading, because the socket's buffer is full."""
        self._outbox.is_paused = True
        self.paused_ns = time.monotonic_ns()
        self._hold_written(self._transport.get_write_buffer_size())
        self._set_reading()

    def resume_writing(self) -> None:
        """Continue to send and read."""
        self._outbox.is_paused = False
        self.paused_ns = 0
        self._hold_written(0)
        self._set_reading()
        self._outbox.pump()

    def _hold_written(self, num_bytes: int) -> None:
        """Count the bytes in the full buffer of the socket. They may be a complete answer of any size."""
        self.hold(num_bytes - self._num_written)
        self._num_written = num_bytes

    def _set_reading(self) -> None:
        """Read if answers can be written, and while few bytes wait for their turn. Count those that wait."""
        num_kept = len(self._rest) if self._is_waiting else 0
        if num_kept != self._num_kept:
            self.hold(num_kept - self._num_kept)
            self._num_kept = num_kept
        self._pause_reading(bool(self.paused_ns) or num_kept > _READ_AHEAD_BYTES)

    def _pause_reading(self, is_paused: bool) -> None:
        if is_paused != self._is_reading_paused and not self._transport.is_closing():
            self._is_reading_paused = is_paused
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    @property
    def client(self) -> str:
        """The peer's `address:port`, or empty if it has none."""
        peer: Any = self._transport.get_extra_info("peername")
        if not isinstance(peer, tuple):
            return ""
        host, port = cast("tuple[str, int]", peer[:2])
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def calls(self) -> list[Call]:
        """The open calls."""
        return list(self._inbox.calls.values())

    # --- frames ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if self._is_over:
            self._pause_reading(True)  # `check` reads a little at a time, for a peer that closes
            return
        now_ns = time.monotonic_ns()
        if self._is_waiting:
            self._rest += data
            self._set_reading()
        elif now_ns > self._turns.end_ns and not self._turns.begin(now_ns):
            self._rest += data
            self._wait(now_ns)
        else:
            if self._rest:
                data, self._rest = self._rest + data, b""
            if not self._handle(data, now_ns):
                self._wait(now_ns)

    def _wait(self, now_ns: int) -> None:
        """Let a later turn handle the rest of the received bytes. now_ns: when the work in this turn began."""
        self._is_waiting = True
        self._allowance.set_behind(True)
        self._set_reading()
        self._turns.wait(self._share, self._go_on, used_ns=time.monotonic_ns() - now_ns)

    def _go_on(self) -> bool:
        """Handle bytes that have waited for their turn. Return whether there are more."""
        if not self._is_over and self._has_left():
            self.abort()
        if not self._is_over:
            data, self._rest = self._rest, b""
            if not self._handle(data, time.monotonic_ns()):
                self._set_reading()
                return True
        self._is_waiting = False
        self._allowance.set_behind(False)
        if not self._is_over:
            self._set_reading()
        return False

    def _has_left(self) -> bool:
        """Return whether the client has closed the connection. While reading is paused, no event reports that."""
        sock: Any = self._transport.get_extra_info("socket")
        return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != _ESTABLISHED

    def _handle(self, data: bytes, now_ns: int) -> bool:
        """Handle received bytes. Return False if the rest must wait for a later turn. Raises nothing."""
        self._inbox.now_ns = now_ns
        try:
            return self._read(data)
        except ConnectionFault as fault:
            self.end(fault)
        except Exception:
            _log.exception("a connection failed")
            self.end(ConnectionFault(Code.INTERNAL_ERROR, "internal error"))
        return True

    def _read(self, data: bytes) -> bool:
        at, size, num_frames = 0, len(data), 0
        if not self._has_greeted:
            if not self._greet(data):
                return True
            at = len(PREFACE)
        inbox, control, turns, is_in_time = self._inbox, self._control, self._turns, True
        while True:
            if num_frames >= _FREE_FRAMES and at < size and time.monotonic_ns() > turns.end_ns:
                is_in_time = False
                break
            num_frames += 1
            if inbox.is_within:
                at = inbox.read_piece(data, at, size)
                if inbox.is_within and at < size:
                    continue
            if size - at < HEAD_BYTES or self._is_over:
                break
            high, low, kind, flags, stream = HEAD.unpack_from(data, at)
            start = at + HEAD_BYTES
            end = start + (high << 16 | low)
            if kind == DATA and end - start <= MAX_FRAME_BYTES and control.is_settled and not inbox.block_stream:
                if flags & PADDED and start == size < end:
                    break
                at = inbox.on_data(data, start, end, flags, stream & STREAM_MASK)
                continue
            if not control.check(kind, end - start, stream & STREAM_MASK):
                self._allowance.spend()
                inbox.skip(end - start)
                at = start
                continue
            if end > size:
                break
            control.handle(kind, flags, stream & STREAM_MASK, data[start:end])
            at = end
        if at < size and not self._is_over:
            self._rest = data[at:]
        return is_in_time or self._is_over

    def _greet(self, data: bytes) -> bool:
        """Answer the connection preface. Return False if it is incomplete or not a preface."""
        if len(data) < len(PREFACE) and PREFACE.startswith(data):
            self._rest = data
            return False
        if not data.startswith(PREFACE):
            self._refuse(_NOT_HTTP2 if data[:1].isalpha() else b"")
            return False
        self._has_greeted = True
        limits, window = self._listener.limits, self._inbox.window
        settings = frames.settings_frame({
            frames.MAX_CONCURRENT_STREAMS: limits.max_grpc_streams,
            frames.INITIAL_WINDOW_SIZE: limits.grpc_window_bytes,
            frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
            frames.MAX_HEADER_LIST_SIZE: limits.max_grpc_metadata_bytes,
        })  # fmt: skip
        self._outbox.write(settings + frames.window_frame(0, window - frames.DEFAULT_WINDOW))
        return True

    # --- called by calls ------------------------------------------------------------------------------------------

    def answer(self, call: Call, message: bytes) -> None:
        """Send the only message of a call, and status OK."""
        self._outbox.answer(call, message, status_block(0, "", call.metadata) if call.metadata else OK)

    def send(self, call: Call, message: bytes) -> None:
        """Send one of several messages of a call."""
        self._outbox.send(call, message)

    def finish(self, call: Call, trailers: bytes) -> None:
        """Send the status of a call, after its queued messages."""
        self._outbox.end(call, trailers)

    def turn(self) -> asyncio.Future[None] | None:
        """Return an awaitable to wait for before more work, or None if this turn has time left."""
        if self._turns.begin_call():
            return None
        turn = asyncio.get_running_loop().create_future()
        self._turns.wait(self._share, lambda: None if turn.done() else turn.set_result(None), cost_ns=CALL_NS)
        return turn

    def on_taken(self, call: Call) -> None:
        """Record that a message of a call was taken."""
        self._inbox.on_taken(call)

    def hold(self, num_bytes: int) -> None:
        """Count bytes that are held here; negative if released."""
        self.held_bytes += num_bytes
        self._listener.hold(num_bytes)

    def _on_sent(self, call: Call) -> None:
        self._allowance.num_sent += 1
        self._inbox.on_sent(call)
        self.on_left()

    def on_left(self) -> None:
        """Close a draining connection after its last call has ended."""
        if self._inbox.final_stream != frames.MAX_WINDOW and not self._inbox.calls and not self._is_over:
            self.close()

    # --- ends -----------------------------------------------------------------------------------------------------

    def check(self, now_ns: int) -> None:
        """End stalled handshakes, headers, messages and answers. Called several times a second."""
        listener, inbox = self._listener, self._inbox
        if self.closing_ns:
            if now_ns - self.closing_ns > listener.linger_ns:
                self.abort()
            self._pause_reading(False)
            return
        is_late = not self._control.is_settled and now_ns - self.opened_ns > listener.idle_ns
        if is_late or (inbox.block_stream and now_ns - inbox.block_ns > listener.idle_ns):
            self.end(ConnectionFault(Code.ENHANCE_YOUR_CALM, "too slow"), "slow")
        elif self.paused_ns and now_ns - self.paused_ns > listener.unread_ns:
            listener.on_ended("unread")
            self.abort()
        else:
            for call in self.calls:
                if call.deadline_ns or call.moved_ns:
                    self._check_call(call, now_ns)

    def _check_call(self, call: Call, now_ns: int) -> None:
        fault = self._listener.fault_of(call, now_ns)
        if fault is None or call.is_over:
            return
        if call.unsent is None:
            call.finish(*fault)
        elif self._outbox.is_stuck and fault[0] is Status.CANCELLED:
            self._listener.on_ended("unread")
            self.abort()
        else:
            try:
                self._inbox.reset(call, Code.CANCEL)
            except ConnectionFault as error:
                self.end(error)
        call.cancel_work()

    def end(self, fault: ConnectionFault, reason: str = "") -> None:
        """Send GOAWAY with the fault, and close."""
        self._listener.on_ended(reason or ("work" if fault.code is Code.ENHANCE_YOUR_CALM else "protocol"))
        last = self._inbox.last_stream
        self._refuse(frames.goaway_frame(last, fault.code, fault.text) if self._has_greeted else b"")

    def _refuse(self, words: bytes) -> None:
        """Send last bytes, and close when the peer does. An earlier close could reset the connection and lose them."""
        self._is_over = True
        self.closing_ns = self.closing_ns or time.monotonic_ns()
        self._outbox.write(words)
        self._outbox.stop()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()
        self._drop_calls()

    def close(self) -> None:
        """Close after all written bytes are sent. `check` aborts a connection that does not finish."""
        self._is_over = True
        self.closing_ns = self.closing_ns or time.monotonic_ns()
        self._outbox.stop()
        self._transport.close()
        self._drop_calls()

    def abort(self) -> None:
        """Close the connection at once."""
        self._is_over = True
        self._outbox.stop()
        self._transport.abort()

    def drain(self) -> None:
        """Ask the client to open no more calls. `finish_drain` follows when it has acknowledged a ping behind that."""
        if not self._has_greeted or self._is_over:
            self.close()
            return
        self._is_draining = True
        ping = frames.frame(frames.PING, 0, 0, b"draining")
        self._outbox.write(frames.goaway_frame(frames.MAX_WINDOW, Code.NO_ERROR, "the server is stopping") + ping)

    def on_ping_ack(self) -> None:
        """Finish draining, if it has begun: the client has acknowledged the ping that `drain` sent."""
        if self._is_draining:
            self.finish_drain()

    def finish_drain(self) -> None:
        """Accept no more calls, and close when the open calls have ended."""
        if self._inbox.final_stream != frames.MAX_WINDOW or self._is_over:
            return
        last = self._inbox.final_stream = self._inbox.last_stream
        self._outbox.write(frames.goaway_frame(last, Code.NO_ERROR, "the server is stopping"))
        self.on_left()

    def _drop_calls(self) -> None:
        """Remove all calls at once, and cancel their work as the turns have time for it."""
        for call in self.calls:
            self._inbox.remove(call)
            self._turns.leave(call.leave)
