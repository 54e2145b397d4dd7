"""Encodes a stream of OpenAI's chat and completions: chunks with the same head, the usage once, then `[DONE]`.

Source: generation API reference, sections 3.5 and 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sie.frontend.dialects.openai.agent_reply import agent_events
from sie.frontend.dialects.openai.text_fields import DONE, KEEP_ALIVE, Shown, data_line, error_events, usage_object
from sie.values.agent import ApprovalRequired, FileProduced, ToolProgress
from sie.values.errors import SieError
from sie.values.generate import Ended, Finished, GenerateEvent, GenerateUsage


class ChunkWriter(ABC):
    """Writes a stream. Each route's subclass turns events into choices.

    The usage is in the chunk that finishes the last choice, or in a separate chunk if the request asks for that.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, shown: Shown, kind: str, model: str) -> None:
        """Kind is the `object` of a chunk."""
        self._shown = shown
        self._head = shown.head(kind, model)

    def write(self, events: Sequence[GenerateEvent]) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        ended = events[-1] if isinstance(events[-1], Ended) else None
        usage, session = (ended.usage, ended.session) if ended is not None else (None, "")
        last = max((number for number, event in enumerate(events) if isinstance(event, Finished)), default=-1)
        parts: list[bytes] = []
        for number, event in enumerate(events):
            if isinstance(event, Ended):
                parts += [*([self._chunk([], event.usage, session)] if self._shown.wants_usage else []), DONE]
            elif isinstance(event, ToolProgress | ApprovalRequired | FileProduced):
                parts.append(agent_events(event))
            else:
                is_last = number == last and usage is not None
                shown = usage if is_last and not self._shown.wants_usage else None
                own = session or self._shown.session_id if is_last else ""
                parts += [self._chunk(choices, shown, own) for choices in self._chunks(event)]
        return b"".join(parts)

    def write_error(self, error: SieError) -> bytes:
        """See `sie.frontend.http.stream.EventWriter`."""
        return error_events(error)

    @abstractmethod
    def _chunks(self, event: GenerateEvent) -> list[list[dict[str, Any]]]:
        """Return the `choices` of each chunk for an event."""

    def _chunk(self, choices: list[dict[str, Any]], usage: GenerateUsage | None = None, session: str = "") -> bytes:
        own = {"session_id": session} if session else {}
        return data_line({**self._head, "choices": choices, "usage": usage_object(usage) if usage else None, **own})
