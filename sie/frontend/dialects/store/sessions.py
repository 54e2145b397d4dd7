"""Reads and writes sessions: a stored conversation with its files. Source: generation API reference, section 8.7."""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import pybase64

from sie.config.limits import Limits
from sie.frontend.dialects.openai.chat_messages import MessageField, read_messages
from sie.frontend.dialects.openai.text_fields import decode_body
from sie.frontend.dialects.store.bodies import FileField, SessionBody
from sie.frontend.generation.sampling_fields import wrong
from sie.values.choices import with_choices
from sie.values.generate import ChatMessage

_FILE_ID: Final = re.compile(r"file[-_][A-Za-z0-9_-]{1,100}")
_to_json: Final = msgspec.json.Encoder().encode


_DECODER: Final = msgspec.json.Decoder(SessionBody)
_read_raw: Final = msgspec.json.Decoder(MessageField).decode
_read_list: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def decode_session(body: bytes, content_type: str | None, limits: Limits) -> tuple[bytes, Sequence[FileField]]:
    """Return the messages of a session, as JSON, and its files. Raises BadRequest naming the field."""
    given = decode_body(_DECODER, body, content_type, limits)
    for field in ("images", "videos"):
        if getattr(given, field):
            raise wrong(field, "must be empty: conversations are text here")
    files = given.files or []
    for number, file in enumerate(files):
        if not _FILE_ID.fullmatch(file.id):
            raise wrong(f"files[{number}].id", "must be 'file-' or 'file_' and letters, digits, _ and -")
    messages = _to_json(given.messages)
    read_session(messages)
    return messages, files


def body_of(file: FileField, path: str) -> bytes | None:
    """Return the bytes of a file of a session, or None without a body. Raises BadRequest naming the field."""
    if file.text is not None:
        return file.text.encode("utf-8", "replace")
    return decode_base64(file.data_base64, f"{path}.data_base64") if file.data_base64 is not None else None


def read_session(messages: bytes) -> list[ChatMessage]:
    """Return the conversation of a session. Raises BadRequest naming the message."""
    fields: list[MessageField] = []
    for number, raw in enumerate(_read_list(messages)):
        try:
            fields.append(_read_raw(raw))
        except msgspec.ValidationError as error:
            raise wrong(f"messages[{number}]", f"is not a message: {with_choices(error, MessageField)}") from None
    return read_messages(fields) if fields else []


def encode_messages(messages: Sequence[ChatMessage]) -> bytes:
    """Return a conversation as the JSON that a session stores."""
    return _to_json([_message(message) for message in messages])


def encode_session(messages: bytes, files: Sequence[dict[str, Any]]) -> bytes:
    """Return the body that shows a session. files are in the form of `sie.frontend.dialects.store.openai_files`."""
    return _to_json({"messages": msgspec.Raw(messages), "images": [], "videos": [], "files": files})


def decode_base64(text: str, field: str) -> bytes:
    """Return the bytes of a text in base64, or of a `data:` URL with one. Raises BadRequest."""
    given = text.partition(";base64,")[2] if text.startswith("data:") else text
    try:
        return pybase64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise wrong(field, "is not valid base64") from None


def _message(message: ChatMessage) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    optional = {
        "name": message.name,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning,
    }
    given = {name: value for name, value in optional.items() if value is not None}
    return {"role": message.role, "content": message.content, **given}
