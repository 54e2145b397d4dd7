"""Owns how a failure is told over gRPC: its status code, and text that fits into a trailer."""

from __future__ import annotations

from typing import Final

import grpc

from sie.errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    Forbidden,
    ModelLoadFailed,
    NotFound,
    Overloaded,
    RateLimited,
    SieError,
    Unauthorized,
    Unavailable,
)

_MAX_DETAIL_BYTES: Final = 1500
"""Clients take 8 KiB of trailers, and percent-encoding may make three bytes of one."""
_CODES: Final[tuple[tuple[type[SieError], grpc.StatusCode], ...]] = (
    (BadRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (RateLimited, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Overloaded, grpc.StatusCode.UNAVAILABLE),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ClientGone, grpc.StatusCode.CANCELLED),
)


def status_code(error: SieError) -> grpc.StatusCode:
    """Return the status code of a failure; INTERNAL for one that has none of its own."""
    if error.code == "UNSUPPORTED":
        return grpc.StatusCode.UNIMPLEMENTED
    if isinstance(error, ModelLoadFailed):
        # 400 where the client asked for the load itself.
        return grpc.StatusCode.INVALID_ARGUMENT if error.http_status == 400 else grpc.StatusCode.UNAVAILABLE
    return next((code for cls, code in _CODES if isinstance(error, cls)), grpc.StatusCode.INTERNAL)


def details(error: SieError) -> str:
    """Return a failure's message, cut to what every client takes."""
    return error.message.encode(errors="replace")[:_MAX_DETAIL_BYTES].decode(errors="ignore")
