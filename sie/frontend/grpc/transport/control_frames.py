"""Handles every frame of a connection except DATA: headers, settings, windows, pings and ends.

Such frames are short, so each is handled when it is complete. Source: RFC 9113, sections 5.5, 6 and 10.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final, Protocol

from sie.frontend.grpc.transport import frames
from sie.frontend.grpc.transport.calls import Call
from sie.frontend.grpc.transport.floods import Allowance, work_of_settings
from sie.frontend.grpc.transport.frames import Code, ConnectionFault, StreamFault
from sie.frontend.grpc.transport.inbox import Inbox, InboxListener
from sie.frontend.grpc.transport.outbox import Outbox

MAX_FRAME_BYTES: Final = 1 << 20
"""Largest frame of DATA that a client may send."""
_SHORT_BYTES: Final = 16_384
"""Largest frame that is neither DATA nor headers."""


class ControlledConnection(Protocol):
    """The part of the connection that its control frames concern."""

    @property
    def calls(self) -> list[Call]:
        """The open calls."""
        ...

    def on_ping_ack(self) -> None:
        """Finish draining, if it has begun: the client has acknowledged the ping that announced it."""
        ...


class ControlFrames:
    """The control frames of one connection."""

    def __init__(
        self,
        connection: ControlledConnection,
        inbox: Inbox,
        outbox: Outbox,
        allowance: Allowance,
        listener: InboxListener,
    ) -> None:
        self._connection = connection
        self._inbox = inbox
        self._outbox = outbox
        self._allowance = allowance
        self._listener = listener
        self.is_settled = False
        """Whether the client's first SETTINGS have arrived."""

    def check(self, kind: int, length: int, stream: int) -> bool:
        """Return whether frames of this kind are handled here. Others are DATA, or extensions to skip.

        Raises ConnectionFault for a frame that is not allowed now, or is too long to buffer.
        """
        if length > MAX_FRAME_BYTES:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        if not self.is_settled and kind != frames.SETTINGS:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        inbox = self._inbox
        if inbox.block_stream and (kind != frames.CONTINUATION or stream != inbox.block_stream):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block is interrupted")
        is_known = kind in self._HANDLERS
        if kind in (frames.HEADERS, frames.CONTINUATION):
            if length > 2 * self._listener.limits.max_grpc_metadata_bytes:
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"headers of {length} bytes")
        elif is_known and length > _SHORT_BYTES:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        return is_known

    def handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Handle a complete frame that `check` allowed. Raises ConnectionFault."""
        self._HANDLERS[kind](self, flags, stream, payload)

    def _on_headers(self, flags: int, stream: int, payload: bytes) -> None:
        self._inbox.on_headers(flags, stream, payload)

    def _on_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        self._inbox.on_continuation(flags, stream, payload)

    def _on_priority(self, flags: int, stream: int, payload: bytes) -> None:
        self._allowance.spend()
        if not stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != 5:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")

    def _on_reset(self, flags: int, stream: int, payload: bytes) -> None:
        self._allowance.spend()
        frames.read_u32(payload, "RST_STREAM")
        self._inbox.on_reset(stream)

    def _on_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & frames.ACK:
            self._allowance.spend()
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an acknowledgement with settings")
            return
        self.is_settled = True
        settings = frames.read_settings(payload)
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self._outbox.initial_window)
        num_windows = len(self._inbox.calls) if window != self._outbox.initial_window else 0
        self._allowance.spend(work_of_settings(len(payload), num_windows))
        self._outbox.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._outbox.settle(settings, self._connection.calls)

    def _on_push(self, flags: int, stream: int, payload: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a client does not push")

    def _on_ping(self, flags: int, stream: int, payload: bytes) -> None:
        self._allowance.spend()
        if stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if not flags & frames.ACK:
            self._outbox.write(frames.frame(frames.PING, frames.ACK, 0, payload))
        else:
            self._connection.on_ping_ack()

    def _on_goaway(self, flags: int, stream: int, payload: bytes) -> None:
        self._allowance.spend()
        if stream:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")

    def _on_window(self, flags: int, stream: int, payload: bytes) -> None:
        self._allowance.spend()
        num_bytes = frames.read_u32(payload, "WINDOW_UPDATE")
        if not stream:
            self._outbox.widen(num_bytes)
            return
        self._inbox.check_opened(stream, "WINDOW_UPDATE")
        call = self._inbox.calls.get(stream)
        if call is not None:
            try:
                self._outbox.widen_call(call, num_bytes)
            except StreamFault as fault:
                self._inbox.reset(call, fault.code)

    _HANDLERS: ClassVar[dict[int, Callable[[ControlFrames, int, int, bytes], None]]] = {
        frames.HEADERS: _on_headers,
        frames.PRIORITY: _on_priority,
        frames.RST_STREAM: _on_reset,
        frames.SETTINGS: _on_settings,
        frames.PUSH_PROMISE: _on_push,
        frames.PING: _on_ping,
        frames.GOAWAY: _on_goaway,
        frames.WINDOW_UPDATE: _on_window,
        frames.CONTINUATION: _on_continuation,
    }
