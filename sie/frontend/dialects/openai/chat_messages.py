"""Decodes the messages of a chat: roles, content parts and calls. Source: generation API reference, section 3.2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from sie.frontend.generation.sampling_fields import wrong
from sie.values.errors import BadRequest
from sie.values.generate import ROLES, ChatMessage, InputFile, ToolCall

_MAX_LIST: Final = 65_536
ROLE: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,256}")
_SPEAKER: Final = re.compile(r"[^\s<|\\>]{1,256}")
"""Templates put names and roles between their special tokens, so a name or role cannot hold parts of such a token."""
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal"})
_MEDIA: Final = frozenset(
    {"image_url", "input_image", "image", "audio_url", "input_audio", "audio", "video_url", "video"}
)


class FileRef(msgspec.Struct):
    """A file by the id of an upload, or with its name and its data."""

    file_id: str | None = None
    filename: str | None = None
    file_data: str | None = None
    file_url: Any = None


class PartField(msgspec.Struct):
    """One part of a content."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    file: FileRef | None = None


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
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[CallField], Meta(max_length=_MAX_LIST)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    function_call: Any = None


def read_messages(
    messages: str | list[MessageField], files: list[InputFile] | None = None, *, continues: bool = False
) -> list[ChatMessage]:
    """Return the conversation; a text alone is a user's message. Raises BadRequest naming the message.

    The files that users name are added to `files`; without it, files are refused. continues: an earlier part of the
    conversation is stored, so a tool result may come without its call.
    """
    if isinstance(messages, str):
        return [ChatMessage(role="user", content=messages)]
    if not messages:
        raise wrong("messages", "must hold at least one message")
    read = [_read_message(message, f"messages[{index}]", files) for index, message in enumerate(messages)]
    if not continues:
        find_calls(read, "messages[{}].tool_call_id")
    return read


def ends_with_partial_answer(messages: Sequence[ChatMessage]) -> bool:
    """Tell whether a conversation ends with only the beginning of an answer, which the model continues."""
    *before, last = messages
    is_text = bool(last.content) and not last.tool_calls and last.reasoning is None
    return bool(before) and last.role == "assistant" and is_text


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
            shown = (message.given_call_id or result)[:80]
            raise wrong(field.format(index), f"has the result of call {shown!r}, but that call is not before it")
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


def _read_message(message: MessageField, path: str, files: list[InputFile] | None) -> ChatMessage:
    if not ROLE.fullmatch(message.role):
        raise _wrong(path, "role", "must be a short word, such as 'user'")
    if message.name is not None and not _SPEAKER.fullmatch(message.name):
        raise _wrong(path, "name", "must have at most 256 characters, without white space and <|\\>")
    if message.function_call is not None:
        raise _wrong(path, "function_call", "is not served; use 'tool_calls'")
    content = message.content if message.content is not None else message.refusal
    if content is None and not message.tool_calls:
        raise _wrong(path, "content", "is required where there are no 'tool_calls'")
    reasoning = message.reasoning_content
    if reasoning is None and isinstance(message.reasoning, str):
        reasoning = message.reasoning
    return ChatMessage(
        role=message.role,
        role_field="" if message.role in ROLES else f"{path}.role",
        content=_join(content, f"{path}.content", files if message.role == "user" else None)
        if isinstance(content, list)
        else content,
        name=message.name,
        tool_calls=tuple(
            _read_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or ())
        ),
        tool_call_id=message.tool_call_id,
        reasoning=reasoning,
    )


def _join(parts: list[PartField], path: str, files: list[InputFile] | None) -> str:
    """Return the text of a content's parts, joined by spaces. Files are added to `files`, if they may be there."""
    texts: list[str] = []
    for number, part in enumerate(parts):
        kind = part.type or "text"
        if kind == "file" and files is not None:
            files.append(_read_file(part.file, f"{path}[{number}].file"))
            continue
        if kind not in _TEXT_PARTS:
            why = "images, audio and video are" if kind in _MEDIA else "files are" if "file" in kind else "that is"
            text = f"Field '{path}[{number}]': a part of type {kind[:40]!r} cannot be read, {why} not served"
            raise BadRequest(text, extras={"param": f"{path}[{number}].type"})
        content = part.refusal if kind == "refusal" and part.text is None else part.text
        if content is None:
            raise _wrong(f"{path}[{number}]", "text", "is required")
        texts.append(content)
    return " ".join(texts)


def _read_file(ref: FileRef | None, path: str) -> InputFile:
    if ref is not None and ref.file_url is not None:
        raise BadRequest(f"Field '{path}.file_url' is not served here; use /v1/responses, or give the file's data",
                         extras={"param": f"{path}.file_url"})  # fmt: skip
    return read_file(path, ref.file_id, ref.filename, ref.file_data) if ref is not None else read_file(path)


def read_file(
    path: str, file_id: str | None = None, name: str | None = None, data: str | None = None, url: str | None = None
) -> InputFile:
    """Return a file that a part names in one way. Raises BadRequest for none or several ways."""
    if sum(bool(one) for one in (file_id, data, url)) != 1:
        raise BadRequest(f"Field '{path}' must hold one of 'file_id' and 'file_data'", extras={"param": path})
    return InputFile(field=path, file_id=file_id or "", name=name or "", data=data or "", url=url or "")


def _read_call(call: CallField, path: str) -> ToolCall:
    if call.type not in {None, "function"}:
        raise _wrong(path, "type", "must be 'function'")
    if not NAME.fullmatch(call.function.name):
        raise _wrong(path, "function.name", "must hold only letters, digits and _.:/-, at most 256")
    name = call.function.name
    return ToolCall(id=call.id or name, name=name, arguments=call.function.arguments or "{}")


def _wrong(path: str, field: str, reason: str) -> BadRequest:
    return BadRequest(f"Field '{path}.{field}' {reason}", extras={"param": f"{path}.{field}"})
