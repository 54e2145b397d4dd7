"""Assembles gRPC's length-prefixed messages from pieces of bytes. Pure. Must not decompress messages.

Source: gRPC's PROTOCOL-HTTP2, Length-Prefixed-Message.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

PREFIX: Final = struct.Struct(">BL")
"""The compressed flag of a message, and its length."""
PREFIX_BYTES: Final = 5
_SMALL_BYTES: Final = 64 * 1024
"""Smaller pieces are copied together, because views of them would keep much larger buffers alive."""


class Message(NamedTuple):
    """One message in the form in which it was sent."""

    is_compressed: bool
    data: bytes


class TooLarge(Exception):
    """A message whose announced length is over the limit."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class BadPrefix(Exception):
    """A message with an invalid prefix."""


class MessageReader:
    """Assembles the messages of one stream."""

    __slots__ = ("_is_compressed", "_max_bytes", "_missing", "_parts", "_prefix", "num_held")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefix = b""
        self._missing = -1
        self._is_compressed = False
        self._parts: list[bytes | bytearray | memoryview] = []
        self.num_held = 0
        """Bytes of the incomplete message."""

    @property
    def num_missing(self) -> int:
        """Bytes that the incomplete message still needs, as far as its length is known; or negative."""
        return self._missing

    @property
    def is_between(self) -> bool:
        """Whether no message is incomplete."""
        return self._missing < 0 and not self._prefix

    def feed(self, data: bytes | memoryview) -> list[Message]:
        """Return the messages that these bytes complete. Raises TooLarge or BadPrefix."""
        found: list[Message] = []
        at, size = 0, len(data)
        while at < size or self._missing == 0:
            if self._missing < 0:
                at = self._read_prefix(data, at)
                continue
            end = min(size, at + self._missing)
            self._keep(data[at:end])
            self._missing -= end - at
            at = end
            if not self._missing:
                found.append(Message(self._is_compressed, b"".join(self._parts)))
                self._parts, self._missing, self.num_held = [], -1, 0
        return found

    def _read_prefix(self, data: bytes | memoryview, at: int) -> int:
        end = at + PREFIX_BYTES - len(self._prefix)
        prefix = self._prefix + bytes(data[at:end])
        if len(prefix) < PREFIX_BYTES:
            self._prefix = prefix
            return len(data)
        self._prefix = b""
        packed, self._missing = PREFIX.unpack(prefix)
        if packed > 1:
            raise BadPrefix
        if self._missing > self._max_bytes:
            raise TooLarge(self._missing)
        self._is_compressed = bool(packed)
        return end

    def _keep(self, piece: bytes | memoryview) -> None:
        self.num_held += len(piece)
        if len(piece) >= _SMALL_BYTES:
            self._parts.append(piece)
            return
        last = self._parts[-1] if self._parts else None
        if isinstance(last, bytearray):
            last += piece
        else:
            self._parts.append(bytearray(piece))
