"""Defines the JSON bodies of the routes of skills and sessions. Source: generation API reference, sections 8.7 and 8.8."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

_MAX_LIST: Final = 65_536
_Short = Annotated[str, Meta(max_length=1024)]
_Word = Annotated[str, Meta(max_length=64)]
_Size = Annotated[int, Meta(ge=0, le=2**53)]


class FileOrigin(msgspec.Struct):
    """Where a file comes from."""

    tool: _Word = ""
    round: _Size = 0
    turn: _Size = 0


class FileField(msgspec.Struct):
    """A File of a session. Without a body, the server knows about it and cannot send it."""

    id: str
    name: _Short
    bytes: _Size = 0
    mime_type: _Short | None = None
    format: _Short | None = None
    created_at: _Size | None = None
    purpose: _Word = ""
    source: FileOrigin | None = None
    text: str | None = None
    preview: str | None = None
    data_base64: str | None = None
    code: _Word | None = None
    message: _Short | None = None


class SessionBody(msgspec.Struct):
    """A session."""

    messages: Annotated[list[msgspec.Raw], Meta(max_length=_MAX_LIST)]
    images: Annotated[list[Any], Meta(max_length=_MAX_LIST)] | None = None
    videos: Annotated[list[Any], Meta(max_length=_MAX_LIST)] | None = None
    files: Annotated[list[FileField], Meta(max_length=_MAX_LIST)] | None = None


class SkillUpdateBody(msgspec.Struct):
    """The change of a skill."""

    default_version: str
