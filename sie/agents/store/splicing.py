"""Joins the messages of a request with the stored conversation that it continues. Pure.

Source: generation API reference, section 8.7. The reference does not define a request that has only the new
messages; docs/decisions/050 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sie.values.generate import ChatMessage

_INSTRUCTIONS: Final = frozenset({"system", "developer"})


def splice(stored: Sequence[ChatMessage], incoming: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the conversation that a request continues.

    A client may repeat the conversation without the calls and results that it never saw. These are put back, up to the
    first message that differs; from there on the request's own messages are used. Or a client sends new messages only:
    none is the assistant's, and they do not begin like the stored conversation. These follow all stored messages.
    """
    instructions, said = _split(incoming)
    own_instructions, before = _split(stored)
    if _is_news(before, said):
        return [*(instructions or own_instructions), *before, *said]
    return [*instructions, *_merge(before, said)]


def _split(messages: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], Sequence[ChatMessage]]:
    """Return the instructions at the beginning, and the rest."""
    place = next((n for n, message in enumerate(messages) if message.role not in _INSTRUCTIONS), len(messages))
    return messages[:place], messages[place:]


def _is_news(before: Sequence[ChatMessage], said: Sequence[ChatMessage]) -> bool:
    if not before or not said:
        return False
    return all(message.role != "assistant" for message in said) and not _match(before[0], said[0])


def _merge(before: Sequence[ChatMessage], said: Sequence[ChatMessage]) -> list[ChatMessage]:
    merged: list[ChatMessage] = []
    rest = list(said)
    unseen = ""
    for message in before:
        if rest and _match(message, rest[0], unseen):
            rest.pop(0)
            unseen = ""
        elif not rest or not _is_hidden(message):  # a client that ends here begins again after its last message
            break
        elif message.role == "assistant":
            unseen += message.content or ""
        merged.append(message)
    return [*merged, *rest]


def _is_hidden(message: ChatMessage) -> bool:
    """Tell whether a message is one that a client may not know: a call, or its result."""
    return message.role == "tool" or bool(message.tool_calls)


def _match(stored: ChatMessage, incoming: ChatMessage, unseen: str = "") -> bool:
    """Tell whether two messages are the same. Clients may write the arguments of a call in another form.

    unseen is the text of the rounds before it, which a stream showed as one text with it.
    """
    content = stored.content or ""
    return (
        stored.role == incoming.role
        and (incoming.content or "") in {content, unseen + content}
        and stored.tool_call_id == incoming.tool_call_id
        and [(call.id, call.name) for call in stored.tool_calls]
        == [(call.id, call.name) for call in incoming.tool_calls]
    )
