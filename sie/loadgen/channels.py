"""Reads answers: one channel for each connection. HTTP/1.1 is here. Never opens a socket.

Other transports implement a channel: `grpc_channel` is one. A channel for a stream of events would time its parts in
`feed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class MalformedError(Exception):
    """An answer that cannot be read; its connection is no longer usable."""


class Response(NamedTuple):
    """One whole answer."""

    error: str
    """The error in a few words that can be counted; empty for a good answer."""
    head: bytes
    """Its headers as received; over gRPC the message of the status."""
    body: bytes


class Channel(Protocol):
    """The protocol on one connection, with one request at a time."""

    def opening(self) -> bytes:
        """Return the first bytes to send on a new connection; may be empty."""
        ...

    def frame(self, data: bytes) -> bytes:
        """Return the bytes to send for a prepared request."""
        ...

    def feed(self, data: bytes) -> Response | None:
        """Add received bytes; return the answer when it is complete. Raises MalformedError."""
        ...

    def replies(self) -> bytes:
        """Return the protocol's own bytes to send since the last call; may be empty."""
        ...


ChannelFactory = Callable[[], Channel]


class Http1Channel:
    """HTTP/1.1 with keep-alive and Content-Length, which every server under test sends."""

    __slots__ = ("_buffer", "_length")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._length = 0

    def opening(self) -> bytes:
        return b""

    def frame(self, data: bytes) -> bytes:
        return data

    def replies(self) -> bytes:
        return b""

    def feed(self, data: bytes) -> Response | None:
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._length:
                return None
            data = bytes(self._buffer)
        head_bytes = data.find(b"\r\n\r\n") + 4
        if head_bytes < 4:
            self._keep(data, 0)
            return None
        length = head_bytes + _content_length(data, head_bytes)
        if len(data) < length:
            self._keep(data, length)
            return None
        self._buffer.clear()
        error = "" if data.startswith(b"HTTP/1.1 200") else f"status {data[9:12].decode('latin-1')}"
        return Response(error, data[:head_bytes], data[head_bytes:length])

    def _keep(self, data: bytes, length: int) -> None:
        self._length = length
        if not self._buffer:
            self._buffer += data


def _content_length(data: bytes, head_bytes: int) -> int:
    at = data.find(b"\r\ncontent-length: ", 0, head_bytes)
    if at < 0:  # the server uses capitals; only then the header is copied
        at = data[:head_bytes].lower().find(b"\r\ncontent-length: ")
    digits = data[at + 18 : data.find(b"\r\n", at + 18)] if at >= 0 else b""
    if not digits.isdigit():
        raise MalformedError("an answer without content-length")
    return int(digits)


def header_value(head: bytes, name: str) -> str | None:
    """Return the value of an HTTP/1.1 answer's header."""
    wanted = name.lower()
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.decode("latin-1").strip().lower() == wanted:
            return value.decode("latin-1").strip()
    return None
