"""The items of `/v1/responses`, which a conversation consists of: on the wire, in the store and for a template.

Source: generation API reference, section 5.1. Items are kept as they are written here, so the answer to one request is
read as the input of the next one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from sie.frontend.dialects.openai.chat_messages import NAME, ROLE
from sie.frontend.generation.sampling_fields import wrong
from sie.values.generate import ChatMessage, ToolCall

_MAX_LIST: Final = 65_536
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})
_MEDIA_WORDS: Final = ("image", "audio", "video", "file")
_SKIPPED: Final = frozenset({"reasoning", "item_reference"})
"""Accepted, and not told to the model."""
_PREFIXES: Final = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs", "shell_call": "sc",
    "shell_call_output": "sco",
}  # fmt: skip
_SHELL: Final = "shell"
"""What a model knows the shell by, in a conversation that had one."""
_NEEDED: Final[dict[str, dict[str, Any]]] = {
    "message": {"status": "completed"},
    "function_call": {"status": "completed", "arguments": "{}"},
    "function_call_output": {"status": "completed"},
    "shell_call": {"status": "completed"},
    "shell_call_output": {"status": "completed"},
    "reasoning": {"summary": []},
    "output_text": {"annotations": [], "logprobs": []},
}
"""What readers of a list of items need of each type of item and part, where a request left it out."""
_PLAIN_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
"""Types of a part that say nothing but who wrote it, which the item does."""
_PART_BREAK: Final = "\n\n"

Item = dict[str, Any]


class InputPart(msgspec.Struct, omit_defaults=True):
    """One part of a content; only text is read."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class OutputPart(InputPart, omit_defaults=True):
    """One part of what came of a call; of a shell's, either what was printed and how it ended, or one of these."""

    stdout: str | None = None
    stderr: str | None = None
    outcome: dict[str, Any] | None = None
    status: str | None = None
    exit_code: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    timed_out: bool | None = None


class InputItem(msgspec.Struct, omit_defaults=True):
    """One item of an input; which fields count depends on its type."""

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
    summary: Annotated[list[InputPart], Meta(max_length=_MAX_LIST)] | None = None
    encrypted_content: str | None = None


Input = str | Annotated[list[InputItem], Meta(max_length=_MAX_LIST)]
_to_json: Final = msgspec.json.Encoder().encode
_kept: Final = msgspec.json.Decoder(list[InputItem])


def read_items(given: Input) -> list[ChatMessage]:
    """Return a conversation; a single text is a user's message. Raises BadRequest naming the item.

    Calls and the text that the model wrote beside them are one message, as templates have it.
    """
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[ChatMessage] = []
    for number, item in enumerate(given):
        path, kind = f"input[{number}]", _kind(item)
        if kind == "message":
            messages.append(_read_message(item, path))
        elif kind in ("function_call", "shell_call"):
            _add_call(messages, _read_call(item, path) if kind == "function_call" else _read_shell_call(item, path))
        elif kind in ("function_call_output", "shell_call_output"):
            messages.append(_read_output(item, path))
        elif kind not in _SKIPPED:
            raise wrong(f"{path}.type", f"is {kind[:40]!r}, which is not served; messages and function calls are")
    return messages


def read_kept(items: bytes) -> list[ChatMessage]:
    """Return the conversation that was kept as JSON."""
    return read_items(_kept.decode(items))


def listed_items(given: Input) -> list[Item]:
    """Return the items of an input as they are kept and listed: each with its type and an id."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    return [_listed(item) for item in given]


def new_id(kind: str) -> str:
    """Return the id of a new item of this type."""
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"


def _kind(item: InputItem) -> str:
    return item.type or ("message" if item.role is not None else "item_reference" if item.id else "")


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
    """Return one part as it is kept; spoken is the type of a plain text there."""
    kind = part.get("type", "text")
    kind = spoken if kind in _PLAIN_TEXTS else kind
    return {**_NEEDED.get(kind, {}), **part, "type": kind}


def _read_message(item: InputItem, path: str) -> ChatMessage:
    role = item.role or ""
    if not ROLE.fullmatch(role):
        raise wrong(f"{path}.role", "must be a short word, such as 'user'")
    if item.content is None:
        raise wrong(f"{path}.content", "is required")
    return ChatMessage(role=role, content=_text(item.content, f"{path}.content"))


def _read_call(item: InputItem, path: str) -> ToolCall:
    if not item.call_id:
        raise wrong(f"{path}.call_id", "is required")
    name = full_name(item.namespace, item.name or "")
    if not NAME.fullmatch(name):
        raise wrong(f"{path}.name", "must be of letters, digits and _.:/-, at most 256")
    return ToolCall(id=item.call_id, name=name, arguments=item.arguments or "{}")


def _read_shell_call(item: InputItem, path: str) -> ToolCall:
    """Return what a shell of another server was told as the call that it was to the model."""
    if not item.call_id:
        raise wrong(f"{path}.call_id", "is required")
    if item.action is None:
        raise wrong(f"{path}.action", "is required")
    return ToolCall(id=item.call_id, name=_SHELL, arguments=_to_json(item.action).decode())


def full_name(namespace: str | None, name: str) -> str:
    """Return what the model knows a function of a namespace by."""
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


def _text(content: str | Sequence[InputPart], path: str) -> str:
    """Return the text of a content; its parts are joined by a blank line."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        here, kind = f"{path}[{number}]", part.type or "text"
        if kind not in _TEXT_PARTS:
            is_media = any(word in kind for word in _MEDIA_WORDS)
            reason = "text is served, media and files are not" if is_media else "which is not known here"
            raise wrong(f"{here}.type", f"is {kind[:40]!r}; {reason}")
        text = part.refusal if kind == "refusal" and part.text is None else part.text
        if text is None:
            raise wrong(f"{here}.text", "is required")
        texts.append(text)
    return _PART_BREAK.join(texts)
