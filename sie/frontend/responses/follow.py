"""Owns the stream of a response that is kept, read again from any of its events on, while it is made or afterwards.

Whoever makes a response may be another process, so its events come from the file of responses, looked at again and again
until the last one is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sie.frontend.dialects.openai import text_fields
from sie.frontend.dialects.responses.replay import end_events, is_terminal, replay
from sie.frontend.dialects.responses.reply import RUNNING
from sie.frontend.http.threads import offload
from sie.frontend.responses.store import Followed
from sie.values.encode import Timing
from sie.values.errors import NotFound, SieError
from sie.values.generate import GenerateEvent, Started

LOOK_S: Final = 0.25
"""Time between two looks at the file."""
_MAX_LATE_LOOKS: Final = 8
"""How often a stream is looked for its last event behind the end of its response: who was cancelled notices late."""
_NEWS: Final[list[GenerateEvent]] = [Started(0, 0)]
"""A sign that there is something to write."""
Look = Callable[[int], Awaitable[Followed | None]]
"""Return what there is of a response behind the event with this number; None when it is gone."""


class ResponseFollower:
    """Reads one stream; see `sie.frontend.http.stream.EventSource` and `EventWriter`, of which it is both."""

    keep_alive = text_fields.KEEP_ALIVE

    def __init__(self, look: Look, after: int, pool: ThreadPoolExecutor) -> None:
        """After is the number of the last event that its client has, -1 for none; pool is for large responses."""
        self.is_over = False
        self._look = look
        self._after = after
        self._pool = pool
        self._num_late_looks = 0
        self._data = b""

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return a sign that there are more events, or none when timeout_s passes first. Raises what keeps them away."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        while True:
            events = await self._next()
            if events or self.is_over:
                self._after += len(events)
                self._data = b"".join(events)
                return _NEWS
            left_s = ends_s - loop.time()
            if left_s <= 0:
                return []
            await asyncio.sleep(min(LOOK_S, left_s))

    def write(self, events: Sequence[GenerateEvent]) -> bytes:  # the protocol's
        """Return what the last `wait` brought."""
        data, self._data = self._data, b""
        return data

    def write_error(self, error: SieError) -> bytes:
        """Return the event of what keeps the others away; it has the number of the first of those."""
        made = text_fields.error_object(error)
        fields = {"code": made["code"], "message": error.message, "param": made["param"]}
        return text_fields.named_event("error", {"sequence_number": self._after + 1, **fields})

    def give_up(self, error: SieError) -> None:  # the protocol's
        """Need nothing more: the response goes on without its readers."""

    def timing(self, began_ns: int) -> Timing | None:  # the protocol's
        """Return None: what is read again took its time before."""
        return None

    async def _next(self) -> list[bytes]:
        """Return the events that are there and were not before, and note whether they are the last."""
        found = await self._look(self._after)
        if found is None:
            raise NotFound("The response was deleted", code="RESPONSE_NOT_FOUND", extras={"param": "response_id"})
        if not found.stream:
            self.is_over = found.status not in RUNNING
            if not found.body:
                return []
            events: list[bytes] = await offload(self._pool, len(found.body), replay, found.body)
            return events[self._after + 1 :]
        if found.stream == "cut":
            raise not_kept()
        if found.events:
            self.is_over = is_terminal(found.events[-1])
            return found.events
        return await self._end(found) if found.status not in RUNNING else []

    async def _end(self, found: Followed) -> list[bytes]:
        """Return the last events of a stream that has none any more: its client has them, or nobody will write them.

        Nothing is returned a few times, as those of a response that was cancelled may be on their way.
        """
        self._num_late_looks += 1
        if found.status == "cancelled" and self._num_late_looks < _MAX_LATE_LOOKS:
            return []
        self.is_over = True
        whole = await self._look(-1)
        is_ended = whole is not None and bool(whole.events) and is_terminal(whole.events[-1])
        return [] if is_ended else end_events(found.body, self._after + 1)


def not_kept() -> SieError:
    """Return the refusal to read a stream again whose events are not there."""
    text = "The stream of this response cannot be read again: its events took more than max_response_stream_bytes"
    return NotFound(text, code="STREAM_NOT_KEPT", extras={"param": "stream"})
