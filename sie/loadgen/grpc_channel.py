"""Speaks unary gRPC over HTTP/2 for a load: one call at a time on a connection, with requests prepared as whole frames.

A client library spends more time on a call than the server under test. This module only writes a stream number into
prepared bytes. It tells the server not to keep a header table, so that trailers are plain text. Source: RFC 9113,
RFC 7541, and gRPC's PROTOCOL-HTTP2.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from sie.loadgen.channels import MalformedError, Response
from sie.loadgen.target import Target

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_HEADER_TABLE_SIZE, _INITIAL_WINDOW_SIZE = 1, 4
_WINDOW_BYTES: Final = (1 << 31) - 1
_FRAME_BYTES: Final = 16_384
_FRAME_HEAD: Final = 9
_REFILL_BYTES: Final = 1 << 30
_MAX_PREFIX: Final = 127
_MAX_LENGTH_BITS: Final = 28


def grpc_request(target: Target, method: str, message: bytes) -> bytes:
    """Return the frames of one call, for stream 0, which `GrpcChannel.frame` replaces."""
    fields = {
        ":method": "POST",
        ":scheme": "http" if target.tls is None else "https",
        ":path": method,
        ":authority": target.authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if target.key:
        fields["authorization"] = f"Bearer {target.key}"
    block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in fields.items())
    body = b"\0" + struct.pack(">I", len(message)) + message
    pieces = [body[start : start + _FRAME_BYTES] for start in range(0, len(body), _FRAME_BYTES)]
    frames = [_frame(_HEADERS, _END_HEADERS, block)]
    frames += [_frame(_DATA, _END_STREAM if piece is pieces[-1] else 0, piece) for piece in pieces]
    return b"".join(frames)


class GrpcChannel:
    """One HTTP/2 connection. The server's window limits the size of a request: 64 KiB with most servers."""

    __slots__ = ("_buffer", "_error", "_message", "_replies", "_says_error", "_stream", "_unrefilled")

    def __init__(self, says_error: Callable[[bytes], str] | None = None) -> None:
        """Set up the channel. says_error returns the error in a message whose status is OK; empty for no error."""
        self._says_error = says_error
        self._buffer = b""
        self._message = b""
        self._error = ""
        self._replies = b""
        self._stream = -1
        self._unrefilled = 0

    def opening(self) -> bytes:
        settings = struct.pack(">HIHI", _HEADER_TABLE_SIZE, 0, _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
        grown = struct.pack(">I", _WINDOW_BYTES - 65_535)
        return _PREFACE + _frame(_SETTINGS, 0, settings) + _frame(_WINDOW_UPDATE, 0, grown)

    def frame(self, data: bytes) -> bytes:
        self._stream += 2
        self._message, self._error = b"", ""
        framed = bytearray(data)
        at = 0
        while at < len(framed):
            length = int.from_bytes(framed[at : at + 3], "big")
            framed[at + 5 : at + _FRAME_HEAD] = self._stream.to_bytes(4, "big")
            at += _FRAME_HEAD + length
        return bytes(framed)

    def replies(self) -> bytes:
        replies, self._replies = self._replies, b""
        return replies

    def feed(self, data: bytes) -> Response | None:
        data = self._buffer + data if self._buffer else data
        at, response = 0, None
        while len(data) - at >= _FRAME_HEAD:
            end = at + _FRAME_HEAD + int.from_bytes(data[at : at + 3], "big")
            if len(data) < end:
                break
            stream = int.from_bytes(data[at + 5 : at + _FRAME_HEAD], "big")
            response = self._on_frame(data[at + 3], data[at + 4], stream, data[at + _FRAME_HEAD : end]) or response
            at = end
        self._buffer = data[at:]
        return response

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> Response | None:
        if kind == _GOAWAY:
            raise MalformedError("the server closes the connection (GOAWAY)")
        if kind == _SETTINGS and not flags & _ACK:
            self._replies += _frame(_SETTINGS, _ACK, b"")
        elif kind == _PING and not flags & _ACK:
            self._replies += _frame(_PING, _ACK, payload)
        elif kind == _DATA:
            self._refill(len(payload))
            if stream == self._stream:
                self._message += payload[1 : -payload[0] or None] if flags & _PADDED else payload
        elif stream != self._stream:
            return None
        elif kind == _RST_STREAM:
            return Response("stream reset", b"", b"")
        elif kind == _HEADERS:
            self._error = _grpc_error(payload) or self._error
            if flags & _END_STREAM:
                return self._whole(payload)
        return None

    def _whole(self, trailers: bytes) -> Response:
        if not self._error and len(self._message) < 5:
            self._error = "no message"
        if not self._error and self._says_error is not None:
            self._error = self._says_error(self._message[5:])
        return Response(self._error, _field(trailers, b"grpc-message"), b"" if self._error else self._message[5:])

    def _refill(self, num_bytes: int) -> None:
        """Refill the connection's window in large pieces; a stream's own window is never used up."""
        self._unrefilled += num_bytes
        if self._unrefilled >= _REFILL_BYTES:
            self._replies += _frame(_WINDOW_UPDATE, 0, struct.pack(">I", self._unrefilled))
            self._unrefilled = 0


def _grpc_error(block: bytes) -> str:
    """Return `grpc-status N` when a block of headers has one that is not 0."""
    status = _field(block, b"grpc-status")
    return f"grpc-status {status.decode('latin-1')}" if status not in {b"", b"0"} else ""


def _field(block: bytes, name: bytes) -> bytes:
    """Return the value of a literal field in a block of headers; empty without the field."""
    _, _, rest = block.partition(name)
    if not rest:
        return b""
    length, at = rest[0] & _MAX_PREFIX, 1
    if length == _MAX_PREFIX:
        for shift in range(0, _MAX_LENGTH_BITS, 7):
            byte = int.from_bytes(rest[at : at + 1], "big")
            length, at = length + ((byte & 127) << shift), at + 1
            if byte < 128:
                break
    return rest[at : at + length]


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + b"\0\0\0\0" + payload


def _literal(text: str) -> bytes:
    """Return a string literal without Huffman code."""
    encoded = text.encode()
    if len(encoded) < _MAX_PREFIX:
        return bytes((len(encoded),)) + encoded
    rest, length = len(encoded) - _MAX_PREFIX, bytearray((_MAX_PREFIX,))
    while rest > _MAX_PREFIX:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes(length) + bytes((rest,)) + encoded
