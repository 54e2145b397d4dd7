"""Owns what a row of the document says of a route: its types."""

from __future__ import annotations

from typing import Any

import msgspec

from sie.frontend.dialects.native.negotiate import JSON

_StructType = type[msgspec.Struct]


class Answer(msgspec.Struct, frozen=True):
    """One status that is no error; media types that share the type, none for an answer without a body.

    No type: the text is described by its media type, JSON as an object or, is_list, as a list.
    """

    status: int
    description: str
    media: tuple[str, ...] = (JSON,)
    type: _StructType | None = None
    is_list: bool = False


class Fault(msgspec.Struct, frozen=True):
    """One status of an error, with the codes that it may have; the OpenAI dialect has names of its own for some."""

    status: int
    codes: tuple[str, ...]
    description: str
    type: _StructType | None = None
    """Of the body; None: that of the route's dialect."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What the document says about one route."""

    template: str
    tag: str
    summary: str
    answers: tuple[Answer, ...]
    method: str = ""
    """Where the path has several routes; empty: the first."""
    description: str = ""
    request: _StructType | None = None
    media: tuple[str, ...] = (JSON,)
    """Of the request."""
    example: dict[str, Any] = {}
    model: str = ""
    """An example of the name in the path, a model's mostly."""
    faults: tuple[Fault, ...] = ()
    has_timing: bool = False
    """Whether a 200 has the headers that say where the time went."""
