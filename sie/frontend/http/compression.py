"""Owns compressed bodies: what a client sent is taken apart within limits, and a reply is made smaller when asked.

Only the routes of the tensor dialects take compressed bodies. Source: KServe v2 sheet, section 9; fault sheet F29, S17.
"""

from __future__ import annotations

import zlib
from typing import Final, Literal

from sie.values.errors import BadRequest, InputTooLong, SieError

Coding = Literal["gzip", "deflate"]
_WINDOW_BITS: Final[dict[Coding, int]] = {"gzip": 31, "deflate": 15}
_FREE_BYTES: Final = 1 << 20
"""Any body may grow to this size: small tensors of one value are hundreds of times smaller when compressed."""
_PIECE_BYTES: Final = 1 << 18
_LEVEL: Final = 1
MIN_BYTES: Final = 1024
"""A reply below this is sent as it is."""


def decompress(body: bytes, coding: str, max_bytes: int, max_ratio: int) -> bytes:
    """Return the body that was sent as `Content-Encoding: coding`.

    Raises SieError 415 for another coding, InputTooLong (413) when it would be over max_bytes, or over 1 MiB and more
    than max_ratio times its size, and BadRequest for data that are damaged, cut, or followed by more.
    """
    bits = _WINDOW_BITS.get(coding.strip().lower())  # type: ignore[arg-type]
    if bits is None:
        raise SieError("Unsupported compression type", code="UNSUPPORTED_MEDIA_TYPE", http_status=415)
    limit = min(max_bytes, max(_FREE_BYTES, len(body) * max_ratio))
    engine = zlib.decompressobj(bits)
    pieces: list[bytes] = []
    size, rest = 0, body
    try:
        while rest and not engine.eof:
            piece = engine.decompress(rest, _PIECE_BYTES)
            rest = engine.unconsumed_tail
            size += len(piece)
            if size > limit:
                raise InputTooLong(
                    f"The body is over {limit} bytes when decompressed (max_body_bytes, max_compression_ratio)",
                    http_status=413,
                )
            pieces.append(piece)
    except zlib.error as error:
        raise BadRequest(f"The body is not valid {coding} data: {error}") from None
    if not engine.eof or engine.unused_data:
        raise BadRequest(f"The {coding} data of the body is cut, or more follows it")
    return b"".join(pieces)


def choose_coding(accept_encoding: str) -> Coding | None:
    """Return the first coding of an `Accept-Encoding` header that can be sent; None to send as it is."""
    for part in accept_encoding.split(","):
        name, _, weight = part.partition(";")
        word = name.strip().lower()
        for coding in _WINDOW_BITS:
            if word == coding and weight.replace(" ", "") not in ("q=0", "q=0.0"):
                return coding
    return None


def compress(body: bytes, coding: Coding) -> bytes | None:
    """Return the body compressed, or None when that would not make it smaller."""
    engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    smaller = engine.compress(body) + engine.flush()
    return smaller if len(smaller) < len(body) else None
