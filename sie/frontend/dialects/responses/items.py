"""Converts the items of a `/v1/responses` conversation between their forms: on the wire, stored and for a template.

Source: generation API reference, section 5.1. Items are stored in the form written here, so the answer to one request can
be read as the input of the next one.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from sie.frontend.dialects.openai.chat_messages import NAME, ROLE, read_file
from sie.frontend.generation.sampling_fields import wrong
from sie.values.generate import ROLES, ChatMessage, InputFile, ToolCall

_MAX_LIST: Final = 65_536
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})
_MEDIA_WORDS: Final = ("image", "audio", "video", "file")
_REFERENCE: Final = "item_reference"
_SKIPPED: Final = frozenset({"reasoning", "web_search_call"})
"""Items that are accepted but not shown to the model."""
_PREFIXES: Final = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "shell_call": "sc",
    "shell_call_output": "sco", "code_interpreter_call": "ci", "web_search_call": "ws",
    "mcp_call": "mcp",
}  # fmt: skip
_SHELL: Final = "shell"
"""The shell's tool name for the model, in a conversation that used one."""
_PYTHON: Final = "code_interpreter"
"""As `_SHELL`, for the Python tool."""
_NEEDED: Final[dict[str, dict[str, Any]]] = {
    "message": {"status": "completed"},
    "function_call": {"status": "completed", "arguments": "{}"},
    "function_call_output": {"status": "completed"},
    "shell_call": {"status": "completed"},
    "shell_call_output": {"status": "completed"},
    "reasoning": {"summary": []},
    "output_text": {"annotations": [], "logprobs": []},
}
"""The fields that clients expect in each type of item and part, for those that a request left out."""
_RESPONSE: Final = "resp_"
_ID_BYTES: Final = 16
_FILE: Final = "input_file"
_PLAIN_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
"""Types of a part that only tell its author, which the item tells, too."""
_PART_BREAK: Final = "\n\n"

Item = dict[str, Any]


class TextPart(msgspec.Struct, omit_defaults=True):
    """One part that is a text."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class InputPart(TextPart, omit_defaults=True):
    """One part of a content: a text or a file."""

    file_id: str | None = None
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None


class OutputPart(TextPart, omit_defaults=True):
    """One part of a call's output. A shell's part has the printed text, the outcome, or both."""

    stdout: str | None = None
    stderr: str | None = None
    outcome: dict[str, Any] | None = None
    status: str | None = None
    exit_code: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timed_out: bool | None = None


class InputItem(msgspec.Struct, omit_defaults=True):
    """One item of an input. Its type decides which fields are read."""

    type: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | Annotated[list[InputPart], Meta(max_length=_MAX_LIST)] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | Annotated[list[OutputPart], Meta(max_length=_MAX_LIST)] | None = None
    action: dict[str, Any] | None = None
    summary: Annotated[list[TextPart], Meta(max_length=_MAX_LIST)] | None = None
    encrypted_content: str | None = None
    server_label: str | None = None
    error: Any = None
    code: str | None = None
    container_id: str | None = None
    outputs: Annotated[list[dict[str, Any]], Meta(max_length=_MAX_LIST)] | None = None


Input = str | Annotated[list[InputItem], Meta(max_length=_MAX_LIST)]


class StoredOutput(msgspec.Struct):
    """The output of a stored response, each item as JSON."""

    output: list[msgspec.Raw]


_to_json: Final = msgspec.json.Encoder().encode
_kept: Final = msgspec.json.Decoder(list[InputItem])


def read_items(given: Input, files: list[InputFile]) -> list[ChatMessage]:
    """Return a conversation; a text alone is a user's message. Raises BadRequest naming the item.

    The files that users name are added to `files`. Calls and the model's text beside them become one message, because templates expect that.
    """
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[ChatMessage] = []
    for number, item in enumerate(given):
        path, kind = f"input[{number}]", _kind(item)
        if kind == "message":
            messages.append(_read_message(item, path, files))
        elif kind in ("function_call", "shell_call"):
            _add_call(messages, _read_call(item, path) if kind == "function_call" else _read_shell_call(item, path))
        elif kind in ("function_call_output", "shell_call_output"):
            messages.append(_read_output(item, path))
        elif kind == "code_interpreter_call":
            _add_code(messages, item, number)
        elif kind == "mcp_call":
            _add_mcp_call(messages, item, path)
        elif kind not in _SKIPPED and kind != _REFERENCE:  # `put_referred` comes later, because it needs the store
            raise wrong(f"{path}.type", f"is {kind[:40]!r}, which is not supported; use messages and function calls")
    return messages


def read_kept(items: bytes) -> tuple[list[ChatMessage], list[InputFile]]:
    """Return the conversation that was stored as JSON, and the files that it names."""
    files: list[InputFile] = []
    messages = read_items(_kept.decode(items), files)
    return messages, [msgspec.structs.replace(file, is_past=True) for file in files]


def name_kept_files(items: Sequence[Item], ids: Sequence[tuple[str, str]]) -> None:
    """Write the ids and names of the kept files into the parts of items that name files, in place of their data.

    ids has one entry for each such part, in order.
    """
    kept = iter(ids)
    for item in items:
        for part in _parts_of(item):
            if part.get("type") == _FILE:
                file_id, name = next(kept)
                part.clear()
                part.update(type=_FILE, file_id=file_id, filename=name)


def listed_items(given: Input) -> list[Item]:
    """Return the items of an input in the form to store and list: each with its type and an id.

    Raises BadRequest for a file in an item that is not a message: nobody would read it.
    """
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    items = [_listed(item) for item in given]
    for number, item in enumerate(items):
        for place, part in enumerate(_parts_of(item) if item["type"] != "message" else ()):
            if part.get("type") == _FILE:
                path = f"input[{number}].content[{place}].type"
                raise wrong(path, f"is {_FILE!r}; only messages of users have files")
    return items


def _parts_of(item: Item) -> list[Item]:
    content = item.get("content")
    return cast("list[Item]", content) if isinstance(content, list) else []


def new_id(kind: str, response_id: str = "") -> str:
    """Return the id of a new item of this type. It holds the id of the response whose output it is in, if there is one."""
    return f"{_PREFIXES.get(kind, 'item')}_{response_id.removeprefix(_RESPONSE)}{secrets.token_hex(_ID_BYTES)}"


def response_of(item_id: str) -> str:
    """Return the id of the response whose output has an item, from an id of `new_id`."""
    return _RESPONSE + item_id.partition("_")[2][: -2 * _ID_BYTES]


def referred_ids(items: Sequence[Item]) -> list[str]:
    """Return the ids in the items of an input that only refer to stored ones."""
    return [item["id"] for item in items if item["type"] == _REFERENCE]


def find_items(bodies: Iterable[bytes], ids: Collection[str], max_bytes: int) -> dict[str, Item]:
    """Return the items with these ids in the outputs of stored responses, in the form to store and list.

    Raises BadRequest if they are over max_bytes.
    """
    found: dict[str, Item] = {}
    num_bytes = 0
    for body in bodies:
        for raw in msgspec.json.decode(body, type=StoredOutput).output:
            if (item := msgspec.json.decode(raw, type=InputItem)).id in ids:
                num_bytes += len(bytes(raw))
                if num_bytes > max_bytes:
                    raise wrong("input", f"refers to items that are over max_generation_body_bytes ({max_bytes})")
                found[item.id or ""] = _listed(item)
    return found


def put_referred(items: list[Item], found: Mapping[str, Item], files: list[InputFile]) -> list[ChatMessage]:
    """Put the found items in the place of those that refer to them; return the conversation. Its files are added to `files`.

    Raises BadRequest for an item that is not stored.
    """
    for number, item in enumerate(items):
        if item["type"] == _REFERENCE:
            if item["id"] not in found:
                raise wrong(f"input[{number}].id", "names an item that is not stored; send the item itself")
            items[number] = found[item["id"]]
    return read_items(msgspec.convert(items, list[InputItem]), files)


def _kind(item: InputItem) -> str:
    return item.type or ("message" if item.role is not None else _REFERENCE if item.id else "")


def _listed(item: InputItem) -> Item:
    kind = _kind(item)
    fields: Item = msgspec.to_builtins(item)
    spoken = "output_text" if item.role == "assistant" else "input_text"
    if kind == "message" and isinstance(item.content, str):
        fields["content"] = [{"text": item.content}]
    if kind in ("message", "function_call_output"):
        for name in ("content", "output"):
            if isinstance(parts := fields.get(name), list):
                fields[name] = [_listed_part(part, spoken) for part in cast("list[Item]", parts)]
    return {**_NEEDED.get(kind, {}), **fields, "type": kind, "id": item.id or new_id(kind)}


def _listed_part(part: Item, spoken: str) -> Item:
    """Return one part in its stored form; spoken is the type of a plain text in this item."""
    kind = part.get("type", "text")
    kind = spoken if kind in _PLAIN_TEXTS else kind
    return {**_NEEDED.get(kind, {}), **part, "type": kind}


def _read_message(item: InputItem, path: str, files: list[InputFile]) -> ChatMessage:
    role = item.role or ""
    if not ROLE.fullmatch(role):
        raise wrong(f"{path}.role", "must be a short word, such as 'user'")
    if item.content is None:
        raise wrong(f"{path}.content", "is required")
    named = files if role == "user" else None
    role_field = "" if role in ROLES else f"{path}.role"
    return ChatMessage(role=role, role_field=role_field, content=_text(item.content, f"{path}.content", named))


def _read_call(item: InputItem, path: str) -> ToolCall:
    if not item.call_id:
        raise wrong(f"{path}.call_id", "is required")
    name = full_name(item.namespace, item.name or "")
    if not NAME.fullmatch(name):
        raise wrong(f"{path}.name", "must hold only letters, digits and _.:/-, at most 256")
    return ToolCall(id=item.call_id, name=name, arguments=item.arguments or "{}")


def _read_shell_call(item: InputItem, path: str) -> ToolCall:
    """Return a call of another server's shell as the tool call that the model made."""
    if not item.call_id:
        raise wrong(f"{path}.call_id", "is required")
    if item.action is None:
        raise wrong(f"{path}.action", "is required")
    return ToolCall(id=item.call_id, name=_SHELL, arguments=_to_json(item.action).decode())


def _add_code(messages: list[ChatMessage], item: InputItem, number: int) -> None:
    """Add a call of the Python tool and its result, as the model knew them."""
    call_id = item.id or f"ci_{number}"
    _add_call(messages, ToolCall(id=call_id, name=_PYTHON, arguments=_to_json({"code": item.code or ""}).decode()))
    logs = "\n".join(str(one.get("logs", "")) for one in item.outputs or ())
    messages.append(ChatMessage(role="tool", content=logs, tool_call_id=call_id))


def _add_mcp_call(messages: list[ChatMessage], item: InputItem, path: str) -> None:
    """Add a call of an MCP server's tool and its result, as the model knew them."""
    if not item.name or not NAME.fullmatch(item.name):
        raise wrong(f"{path}.name", "must hold only letters, digits and _.:/-, at most 256")
    call_id = item.id or f"mcp_{len(messages)}"
    _add_call(messages, ToolCall(id=call_id, name=item.name, arguments=item.arguments or "{}"))
    said = item.output if isinstance(item.output, str) else _to_json(item.error).decode()
    messages.append(ChatMessage(role="tool", content=said, tool_call_id=call_id))


def full_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a function of a namespace."""
    return f"{namespace}.{name}" if namespace else name


def _add_call(messages: list[ChatMessage], call: ToolCall) -> None:
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant":
        messages[-1] = msgspec.structs.replace(last, tool_calls=(*last.tool_calls, call))
    else:
        messages.append(ChatMessage(role="assistant", tool_calls=(call,)))


def _read_output(item: InputItem, path: str) -> ChatMessage:
    if not item.call_id:
        raise wrong(f"{path}.call_id", "is required")
    if item.output is None:
        raise wrong(f"{path}.output", "is required")
    is_shell = item.type == "shell_call_output"
    content = _to_json(item.output).decode() if is_shell else _text(item.output, f"{path}.output")
    return ChatMessage(role="tool", content=content, tool_call_id=item.call_id)


def _text(content: str | Sequence[TextPart], path: str, files: list[InputFile] | None = None) -> str:
    """Return the text of a content; its parts are joined by a blank line. Files are added to `files`, if they may be there."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        here, kind = f"{path}[{number}]", part.type or "text"
        if kind == _FILE and files is not None and isinstance(part, InputPart):
            files.append(read_file(here, part.file_id, part.filename, part.file_data, part.file_url))
            continue
        if kind not in _TEXT_PARTS:
            is_media = any(word in kind for word in _MEDIA_WORDS)
            reason = "only text and files of users are supported" if is_media else "this type is unknown"
            raise wrong(f"{here}.type", f"is {kind[:40]!r}; {reason}")
        text = part.refusal if kind == "refusal" and part.text is None else part.text
        if text is None:
            raise wrong(f"{here}.text", "is required")
        texts.append(text)
    return _PART_BREAK.join(texts)
