"""Maps errors to gRPC status codes and trailer texts. Must keep the texts within the limits of clients."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from sie.values.errors import (
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
"""Clients accept 8 KiB of trailers, and percent-encoding may triple the size of a text."""


class Status(IntEnum):
    """The status of a finished call. Source: gRPC's status codes."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_CODES: Final[tuple[tuple[type[SieError], Status], ...]] = (
    (BadRequest, Status.INVALID_ARGUMENT),
    (NotFound, Status.NOT_FOUND),
    (Unauthorized, Status.UNAUTHENTICATED),
    (Forbidden, Status.PERMISSION_DENIED),
    (RateLimited, Status.RESOURCE_EXHAUSTED),
    (Overloaded, Status.UNAVAILABLE),
    (Unavailable, Status.UNAVAILABLE),
    (DeadlineExceeded, Status.DEADLINE_EXCEEDED),
    (ClientGone, Status.CANCELLED),
)


def status_code(error: SieError) -> Status:
    """Return the status code of an error, or INTERNAL if it has no specific one."""
    if error.code == "UNSUPPORTED":
        return Status.UNIMPLEMENTED
    if error.code == "MESSAGE_TOO_LARGE":
        return Status.RESOURCE_EXHAUSTED
    if isinstance(error, ModelLoadFailed):
        # The status is 400 if the client requested the load itself. Then the client decides whether to retry.
        return Status.INTERNAL if error.http_status == 400 else Status.UNAVAILABLE
    return next((code for cls, code in _CODES if isinstance(error, cls)), Status.INTERNAL)


def details(error: SieError) -> str:
    """Return an error's message, cut to the size that every client accepts."""
    return error.message.encode(errors="replace")[:_MAX_DETAIL_BYTES].decode(errors="ignore")
