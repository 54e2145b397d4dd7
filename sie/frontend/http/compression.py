"""Decompresses request bodies and compresses replies. Decompression must never exceed the limits on size and ratio.

Only the routes of the tensor dialects accept compressed bodies. Source: KServe v2 sheet, section 9; fault sheet F29, S17.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, Literal

from sie.values.errors import BadRequest, InputTooLong, SieError

Coding = Literal["gzip", "deflate"]
_WINDOW_BITS: Final[dict[Coding, int]] = {"gzip": 31, "deflate": 15}
_ZERO_WEIGHTS: Final = frozenset({"q=0", "q=0.", "q=0.0", "q=0.00", "q=0.000"})
"""All forms of a weight that refuses a coding. Source: RFC 9110, section 12.4.2."""
_FREE_BYTES: Final = 1 << 20
"""Any body may grow to this size, because small tensors of one value compress several hundred times."""
_PIECE_BYTES: Final = 1 << 18
_LEVEL: Final = 1
MIN_BYTES: Final = 1024
"""A smaller reply is sent without compression."""
CODING_NOT_SERVED: Final = "Content-Encoding is not supported on this route: send the body uncompressed"


def has_coding(headers: Any) -> bool:
    """Tell whether a request's body must be decompressed. A header value that is not ASCII reads as None."""
    return "content-encoding" in headers and (headers.get("content-encoding") or "").strip().lower() != "identity"


def refuse_coding(headers: Any) -> None:
    """Raise BadRequest for a compressed body, on a route that does not support it."""
    if has_coding(headers):
        raise BadRequest(CODING_NOT_SERVED)


def decompress(body: bytes, coding: str, max_bytes: int, max_ratio: int) -> bytes:
    """Decompress a body that was sent with `Content-Encoding: coding`.

    Raises SieError 415 for an unsupported coding, and BadRequest for data that are damaged, cut, or followed by more.
    Raises InputTooLong (413) if the result is over max_bytes, or over both 1 MiB and max_ratio times the body's size.
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
        raise BadRequest(f"The {coding} data of the body is cut, or other data follows it")
    return b"".join(pieces)


def choose_coding(accept_encoding: str) -> Coding | None:
    """Return the first supported coding of an `Accept-Encoding` header, or None to send without compression."""
    for part in accept_encoding.split(","):
        name, _, weight = part.partition(";")
        word = name.strip().lower()
        is_refused = weight.replace(" ", "").lower() in _ZERO_WEIGHTS
        for coding in _WINDOW_BITS:
            if word == coding and not is_refused:
                return coding
    return None


def compress(body: bytes, coding: Coding) -> bytes | None:
    """Return the compressed body, or None if compression does not make it smaller."""
    engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[coding])
    smaller = engine.compress(body) + engine.flush()
    return smaller if len(smaller) < len(body) else None
