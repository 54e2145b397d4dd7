"""Turns the content blocks of `/v1/messages` into the messages that chat templates read.

Source: generation API reference, section 6.1. Tool results become messages of the role `tool`. They keep their place
between a user's texts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from sie.frontend.dialects.openai.chat_messages import NAME, name_results
from sie.frontend.generation.sampling_fields import wrong
from sie.values.choices import with_choices
from sie.values.generate import ChatMessage, ToolCall

_MAX_LIST: Final = 65_536
_DROPPED: Final = frozenset(
    {
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "tool_search_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
    }
)
"""Blocks that server-side tools of other servers left in a conversation; chat templates cannot show them."""
_MEDIA: Final = frozenset({"image", "document", "audio", "video", "container_upload", "search_result"})
_to_json: Final = msgspec.json.Encoder().encode


class TextBlock(msgspec.Struct):
    """A block that must be text."""

    type: str
    text: str | None = None


class BlockField(TextBlock):
    """One block of a content. Its type decides which fields are read, and which form the ignored fields have."""

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None


_ResultContent = str | Annotated[list[TextBlock], Meta(max_length=_MAX_LIST)] | None


class InputMessage(msgspec.Struct):
    """One message. clear_at and output_config belong to the role `system`."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[BlockField], Meta(max_length=_MAX_LIST)]
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: dict[str, Any] | None = None


def read_conversation(messages: Sequence[InputMessage], *, continues: bool = False) -> list[ChatMessage]:
    """Return the conversation. Raises BadRequest naming the block.

    continues: an earlier part of the conversation is stored, so a tool result may come without its call.
    """
    if not messages:
        raise wrong("messages", "must hold at least one message")
    read: list[ChatMessage] = []
    called: set[str | None] | None = None if continues else set()
    last_user = max((number for number, message in enumerate(messages) if message.role == "user"), default=-1)
    for number, message in enumerate(messages):
        path = f"messages[{number}].content"
        if message.role == "system":
            if message.clear_at != "next_user_message" or number > last_user:
                read.append(_read_instruction(message, f"messages[{number}]"))
        elif isinstance(message.content, str):
            read.append(ChatMessage(role=message.role, content=message.content))
        elif message.role == "user":
            read.extend(_read_user(message.content, path, called))
        else:
            read.append(_read_assistant(message.content, path))
            if called is not None:
                called |= {block.id for block in message.content if block.type == "tool_use"}
    turns = _one_turn_each(read)
    return turns if continues else name_results(turns, "messages")


def _one_turn_each(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Merge consecutive messages of the same role, except tool results.

    Many templates refuse other conversations. Source: the anthropic client 2.12, `messages` of `message_create_params`.
    """
    turns: list[ChatMessage] = []
    for message in messages:
        last = turns[-1] if turns else None
        if last is None or last.role != message.role or message.role == "tool":
            turns.append(message)
            continue
        turns[-1] = ChatMessage(
            role=message.role,
            content=_lines(last.content, message.content),
            tool_calls=last.tool_calls + message.tool_calls,
            reasoning=_lines(last.reasoning, message.reasoning),
        )
    return turns


def _lines(*texts: str | None) -> str | None:
    given = [text for text in texts if text]
    return "\n".join(given) if given else texts[0]


def join_text(blocks: Sequence[TextBlock], path: str) -> str:
    """Return the text of blocks, one line each. Raises BadRequest naming a block that is not text."""
    return "\n".join(_text(block, f"{path}[{number}]") for number, block in enumerate(blocks))


def _read_instruction(message: InputMessage, path: str) -> ChatMessage:
    """Return an instruction within the conversation as text of the user: most templates know only a first system message.

    Source: the anthropic client 2.12, `BetaSystemMessageParam`.
    """
    if message.output_config:
        raise wrong(f"{path}.output_config", "is not supported in a message; give it for the whole request")
    content = message.content
    return ChatMessage(
        role="user", content=content if isinstance(content, str) else join_text(content, f"{path}.content")
    )


def _read_user(blocks: Sequence[BlockField], path: str, called: Container[str | None] | None) -> Iterator[ChatMessage]:
    texts: list[str] = []
    for number, block in enumerate(blocks):
        here = f"{path}[{number}]"
        if block.type in _DROPPED:
            continue
        if block.type != "tool_result":
            texts.append(_text(block, here))
            continue
        if texts:
            yield ChatMessage(role="user", content="\n".join(texts))
            texts = []
        yield _read_result(block, here, called)
    if texts or not blocks:
        yield ChatMessage(role="user", content="\n".join(texts))


def _read_result(block: BlockField, path: str, called: Container[str | None] | None) -> ChatMessage:
    """Return a tool result. called: the ids of the calls before it, or None if an earlier part of the conversation is stored."""
    if not block.tool_use_id:
        raise wrong(f"{path}.tool_use_id", "is required")
    try:
        content: _ResultContent = msgspec.convert(block.content, _ResultContent)
    except msgspec.ValidationError as error:
        raise wrong(f"{path}.content", f"must be a text or blocks: {with_choices(error, _ResultContent)}") from None
    text = join_text(content, f"{path}.content") if isinstance(content, list) else content
    if called is not None and block.tool_use_id not in called:
        raise wrong(
            f"{path}.tool_use_id", f"is {block.tool_use_id[:80]!r}, but no 'tool_use' block before it has this id"
        )
    call_id = _call_id(block.tool_use_id)
    given = block.tool_use_id if block.tool_use_id != call_id else None
    return ChatMessage(role="tool", content=text or "", tool_call_id=call_id, given_call_id=given)


def _read_assistant(blocks: Sequence[BlockField], path: str) -> ChatMessage:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(blocks):
        here = f"{path}[{number}]"
        if block.type == "tool_use":
            calls.append(_read_call(block, here))
        elif block.type == "thinking":
            reasoning.append(block.thinking or "")
        elif block.type not in _DROPPED:
            texts.append(_text(block, here))
    return ChatMessage(
        role="assistant",
        content="\n".join(texts) if texts or not calls else None,
        tool_calls=tuple(calls),
        reasoning="\n".join(reasoning) or None,
    )


def _read_call(block: BlockField, path: str) -> ToolCall:
    if not block.id or not block.name:
        raise wrong(f"{path}.{'name' if block.id else 'id'}", "is required")
    if not NAME.fullmatch(block.name):
        raise wrong(f"{path}.name", "must hold only letters, digits and _.:/-, at most 256")
    return ToolCall(id=_call_id(block.id), name=block.name, arguments=_to_json(block.input or {}).decode())


def _call_id(block_id: str) -> str:
    """Return the id by which all other dialects and stored sessions know the call of a block; the inverse of `reply`."""
    return f"call_{block_id.removeprefix('toolu_')}" if block_id.startswith("toolu_") else block_id


def _text(block: TextBlock, path: str) -> str:
    if block.type in _MEDIA:
        raise wrong(f"{path}.type", f"is {block.type!r}; only text is supported, not media or documents")
    if block.type != "text":
        raise wrong(f"{path}.type", f"is {block.type[:40]!r}, which is unknown")
    if block.text is None:
        raise wrong(f"{path}.text", "is required")
    return block.text
