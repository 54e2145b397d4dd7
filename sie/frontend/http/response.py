"""Defines the HTTP response that handlers return. Knows no dialect."""

from __future__ import annotations

from typing import Final, NamedTuple

Headers = list[tuple[str, str]]
JSON: Final = ("content-type", "application/json")


class Response(NamedTuple):
    """A complete HTTP response."""

    status: int
    headers: Headers
    body: bytes


class FileResponse(NamedTuple):
    """A 200 whose body is a file on disk, which is not read into memory."""

    headers: Headers
    path: str


Answer = tuple[Headers, bytes]
"""The headers and body of a 200 response."""
