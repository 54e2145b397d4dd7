"""The reply that HTTP sends: status, headers and body."""

from __future__ import annotations

from typing import Final, NamedTuple

Headers = list[tuple[str, str]]
JSON: Final = ("content-type", "application/json")


class Response(NamedTuple):
    """What is sent."""

    status: int
    headers: Headers
    body: bytes


Answer = tuple[Headers, bytes]
"""Headers and body of a 200."""
