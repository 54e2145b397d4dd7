"""Decodes the messages of a chat: roles, content parts and calls. Source: generation API reference, section 3.2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from sie.frontend.generation.sampling_fields import wrong
from sie.values.errors import BadRequest
from sie.values.generate import ChatMessage, ToolCall

_MAX_LIST: Final = 65_536
ROLE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_SPEAKER: Final = re.compile(r"[^\s<|\\>]{1,256}")
"""Templates put names and roles between their special tokens, so a name or role cannot hold parts of such a token."""
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_MEDIA: Final = frozenset(
    {"image_url", "input_image", "image", "audio_url", "input_audio", "audio", "video_url", "video"}
)


class PartField(msgspec.Struct):
    """One part of a content."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class CallFunction(msgspec.Struct):
    name: str
    arguments: str | None = None


class CallField(msgspec.Struct):
    """A call that the model made earlier."""

    function: CallFunction
    id: str | None = None
    type: str | None = None


class MessageField(msgspec.Struct):
    """One message."""

    role: str
    content: str | Annotated[list[PartField], Meta(max_length=_MAX_LIST)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallField], Meta(max_length=_MAX_LIST)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    function_call: Any = None


def read_messages(messages: str | list[MessageField]) -> list[ChatMessage]:
    """Return the conversation; a text alone is a user's message. Raises BadRequest naming the message."""
    if isinstance(messages, str):
        return [ChatMessage(role="user", content=messages)]
    if not messages:
        raise wrong("messages", "must hold at least one message")
    read = [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    find_calls(read, "messages[{}].tool_call_id")
    return read


def find_calls(messages: Sequence[ChatMessage], field: str) -> dict[int, str]:
    """Return the name of the called tool for each message that is a tool result with a call id, by message index.

    field is the path in errors, with `{}` for the index of the message. Raises BadRequest for a result without its call,
    because a template would show the model the result of a call that it never made.
    """
    called: dict[str, str] = {}
    found: dict[int, str] = {}
    for index, message in enumerate(messages):
        called |= {call.id: call.name for call in message.tool_calls}
        result = message.tool_call_id
        if result is None and message.role == "tool" and not called:
            raise wrong(field.format(index), "is required: there is no tool call before this result")
        if result is not None and result not in called:
            raise wrong(field.format(index), f"has the result of call {result[:80]!r}, but that call is not before it")
        if result is not None:
            found[index] = called[result]
    return found


def name_results(messages: Sequence[ChatMessage], field: str) -> list[ChatMessage]:
    """Return the conversation with the tool's name in each tool result, because some templates write it.

    Raises the errors of `find_calls`.
    """
    names = find_calls(messages, field)
    return [
        msgspec.structs.replace(message, name=names[index]) if index in names else message
        for index, message in enumerate(messages)
    ]


def _read_message(message: MessageField, path: str) -> ChatMessage:
    if not ROLE.fullmatch(message.role):
        raise _wrong(path, "role", "must be a short word, such as 'user'")
    if message.name is not None and not _SPEAKER.fullmatch(message.name):
        raise _wrong(path, "name", "must have at most 256 characters, without white space and <|\\>")
    if message.function_call is not None:
        raise _wrong(path, "function_call", "is not served; use 'tool_calls'")
    if message.content is None and not message.tool_calls:
        raise _wrong(path, "content", "is required where there are no 'tool_calls'")
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    return ChatMessage(
        role=message.role,
        content=_join(message.content, f"{path}.content") if isinstance(message.content, list) else message.content,
        name=message.name,
        tool_calls=tuple(
            _read_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
        reasoning=reasoning,
    )


def _join(parts: list[PartField], path: str) -> str:
    """Return the text of a content's parts, joined by spaces."""
    texts: list[str] = []
    for number, part in enumerate(parts):
        kind = part.type or "text"
        if kind not in _TEXT_PARTS:
            why = "images, audio and video are" if kind in _MEDIA else "files are" if "file" in kind else "that is"
            text = f"Field '{path}[{number}]': a part of type {kind[:40]!r} cannot be read, {why} not served"
            raise BadRequest(text, extras={"param": f"{path}[{number}].type"})
        content = part.refusal if kind == "refusal" and part.text is None else part.text
        if content is None:
            raise _wrong(f"{path}[{number}]", "text", "is required")
        texts.append(content)
    return " ".join(texts)


def _read_call(call: CallField, path: str) -> ToolCall:
    if call.type not in {None, "function"}:
        raise _wrong(path, "type", "must be 'function'")
    if not NAME.fullmatch(call.function.name):
        raise _wrong(path, "function.name", "must hold only letters, digits and _.:/-, at most 256")
    name = call.function.name
    return ToolCall(id=call.id or name, name=name, arguments=call.function.arguments or "{}")


def _wrong(path: str, field: str, reason: str) -> BadRequest:
    return BadRequest(f"Field '{path}.{field}' {reason}", extras={"param": f"{path}.{field}"})
