"""Decodes HPACK blocks to the heads of calls, and encodes response headers. Pure. Must never use a table for its own blocks.

A client's repeated calls have the same block: a few indexes into the dynamic table of both sides. Decoded heads are
cached by block until that table changes. Our own blocks use no table, so they are constants.
Source: RFC 7541; RFC 9113, section 8; gRPC's PROTOCOL-HTTP2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from hpack import HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable

from sie.frontend.grpc.transport.floods import work_of_block
from sie.frontend.grpc.transport.frames import Code, ConnectionFault, StreamFault
from sie.frontend.grpc.transport.hpack_blocks import ENTRY_BYTES, decode_block

CODINGS: Final = frozenset({"identity", "gzip", "deflate"})
_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 1024
_MAX_TIMEOUT_NS: Final = 1 << 60
_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE: Final = re.compile(rb"[^\x00\r\n]*")
_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])")
_UNIT_NS: Final = {"H": 3600 * 10**9, "M": 60 * 10**9, "S": 10**9, "m": 10**6, "u": 10**3, "n": 1}
_PSEUDO: Final = frozenset({b":method", b":scheme", b":path", b":authority"})
_NEEDED: Final = frozenset({b":method", b":scheme", b":path"})
_OF_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
_UNSAFE: Final = re.compile(rb"[^ -$&-~]")


class Method(Protocol):
    """The fields of `sie.frontend.grpc.methods.Method` that the transport reads."""

    @property
    def is_stream(self) -> bool:
        """Whether the client sends a stream of messages."""
        ...


class CallHead:
    """The headers of a call. Many calls share one head, so it must never be changed.

    headers has the first value of each name, without binary ones, and the authority as `host`. timeout_ns is 0 and
    content_length is -1 if absent. method is None for an unknown path. refusal is the HTTP status for a request that is
    not gRPC, or 0. problem describes any other fault.
    """

    __slots__ = (
        "coding", "content_length", "headers", "is_plain", "is_too_large", "method", "path", "problem", "refusal", "timeout_ns",
    )  # fmt: skip

    def __init__(self, path: str, method: Method | None, headers: dict[str, str], *, refusal: int) -> None:
        self.path = path
        self.method = method
        self.headers = headers
        self.refusal = refusal
        self.coding = headers.get("grpc-encoding", "identity")
        self.problem = ""
        self.timeout_ns = 0
        self.content_length = -1
        self.is_too_large = False
        self.is_plain = True
        """Whether the call can be served without further checks."""
        timeout, length = headers.get("grpc-timeout"), headers.get("content-length")
        if timeout is not None:
            self._read_timeout(timeout)
        if length is not None:
            if not (length.isascii() and length.isdigit()):
                raise StreamFault(Code.PROTOCOL_ERROR)
            self.content_length = int(length[:20])

    def _read_timeout(self, text: str) -> None:
        match = _TIMEOUT.fullmatch(text)
        if match is None:
            self.problem = "grpc-timeout is malformed"
        else:
            self.timeout_ns = max(1, min(int(match[1]) * _UNIT_NS[match[2]], _MAX_TIMEOUT_NS))


class _CountingTable(HeaderTable):
    """HPACK's dynamic table with a count of added entries. Apart from additions, only a resize changes the table."""

    def __init__(self) -> None:
        super().__init__()
        self.num_added = 0

    def add(self, name: bytes, value: bytes) -> None:
        self.num_added += 1
        super().add(name, value)


class HeaderReader:
    """Decodes the header blocks of one connection. Each block must be read once, in order."""

    def __init__(
        self,
        max_bytes: int,
        max_entries: int,
        find: Callable[[str], Method | None],
        spend: Callable[[int], None],
    ) -> None:
        """max_bytes, max_entries: the largest list that is served; twice that ends the connection.

        find returns the method of a path. spend gets the work of each decoded block, and may raise ConnectionFault.
        """
        self._find = find
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._spend = spend
        self._table = _CountingTable()
        self._known: dict[bytes, CallHead] = {}

    def read(self, block: bytes) -> CallHead:
        """Return the head in a block. Raises ConnectionFault if the table is lost, StreamFault if malformed."""
        head = self._known.get(block)
        if head is not None:
            return head
        num_added = self._table.num_added
        head = self._head(self.decode(block))
        if num_added == self._table.num_added and len(block) <= _MAX_KEPT_BYTES and not _resizes(block):
            if len(self._known) >= _MAX_KEPT:
                self._known.clear()
            self._known[block] = head
        return head

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Return the entries of a block. Raises ConnectionFault."""
        num_added = self._table.num_added
        try:
            fields = decode_block(block, self._table, 2 * self._max_bytes, 2 * self._max_entries)
        except OversizedHeaderListError as error:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "far too many headers") from error
        except HPACKError as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, "a header block that is not HPACK") from error
        if num_added != self._table.num_added or _resizes(block):
            self._known.clear()
        work = work_of_block(len(block), len(fields))
        if work:
            self._spend(work)
        return fields

    def _head(self, fields: list[tuple[bytes, bytes]]) -> CallHead:
        pseudo, headers, num_bytes = _sorted_out(fields)
        if not pseudo.keys() >= _NEEDED:
            raise StreamFault(Code.PROTOCOL_ERROR)
        path = pseudo[b":path"].decode("latin-1")
        if (authority := pseudo.get(b":authority")) is not None:
            headers["host"] = authority.decode("latin-1")
        head = CallHead(path, self._find(path), headers, refusal=_refusal(pseudo[b":method"], headers))
        head.is_too_large = num_bytes > self._max_bytes
        if len(fields) > self._max_entries:
            head.problem = f"the call has more than {self._max_entries} entries of metadata (max_grpc_metadata_entries)"
        head.is_plain = not (head.is_too_large or head.problem or head.method is None or head.coding not in CODINGS)
        return head


def _resizes(block: bytes) -> bool:
    """Tell whether a block resizes the table, which is allowed only at its start. Source: RFC 7541, section 6.3."""
    return block[:1] != b"" and block[0] >> 5 == 1


def _sorted_out(fields: Iterable[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], dict[str, str], int]:
    """Return pseudo-headers, headers and their total size. Raises StreamFault. Source: RFC 9113, section 8.2 and 8.3."""
    pseudo: dict[bytes, bytes] = {}
    headers: dict[str, str] = {}
    num_bytes, are_pseudo_over = 0, False
    for name, value in fields:
        num_bytes += len(name) + len(value) + ENTRY_BYTES
        if name[:1] == b":":
            if are_pseudo_over or name in pseudo or name not in _PSEUDO or not _VALUE.fullmatch(value):
                raise StreamFault(Code.PROTOCOL_ERROR)
            pseudo[bytes(name)] = value
            continue
        are_pseudo_over = True
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or name in _OF_CONNECTION:
            raise StreamFault(Code.PROTOCOL_ERROR)
        if name == b"te" and value != b"trailers":
            raise StreamFault(Code.PROTOCOL_ERROR)
        if not name.endswith(b"-bin"):
            headers.setdefault(name.decode("ascii"), value.decode("latin-1"))
    return pseudo, headers, num_bytes


def _refusal(method: bytes, headers: dict[str, str]) -> int:
    """Return the HTTP status for a request that is not gRPC, or 0."""
    if method != b"POST":
        return 405
    kind = headers.get("content-type", "")
    return 0 if kind[:16] == "application/grpc" and kind[16:17] in ("", "+", ";") else 415


# --- answers ----------------------------------------------------------------------------------------------------------


def _text(value: bytes) -> bytes:
    """Return a string literal without Huffman coding. Source: RFC 7541, section 5."""
    if len(value) < 0x7F:
        return bytes((len(value),)) + value
    rest, length = len(value) - 0x7F, bytearray((0x7F,))
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return bytes(length) + value


def entry(name: bytes, value: bytes) -> bytes:
    """Return a header literal that is not added to a table."""
    return b"\0" + _text(name) + _text(value)


_ACCEPTED: Final = entry(b"grpc-accept-encoding", b"identity, deflate, gzip")
OPENING: Final = b"\x88\x0f\x10" + _text(b"application/grpc")
"""`:status: 200` and the content type, by their indexes in the static table."""
GREETING: Final = OPENING + _ACCEPTED
"""`OPENING` and the accepted codings, sent once for each connection."""
OK: Final = entry(b"grpc-status", b"0")
NO_TABLE: Final = b"\x20"
"""Starts the next block for a peer that wants a smaller table; sets ours to size 0. Source: RFC 7541, section 4.2."""


def status_block(code: int, message: str, metadata: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return the trailers with a status."""
    found = OK if not code else entry(b"grpc-status", b"%d" % code)
    if message:
        found += entry(b"grpc-message", _UNSAFE.sub(_percent, message.encode(errors="replace")))
    for name, value in metadata:
        found += entry(name.encode(), value.encode("ascii", "replace"))
    return found


def refusal_block(http_status: int) -> bytes:
    """Return the headers that refuse a request that is not gRPC."""
    return b"\x08" + _text(b"%d" % http_status) + entry(b"accept-post", b"application/grpc")


def _percent(match: re.Match[bytes]) -> bytes:
    return b"%%%02X" % match[0][0]
