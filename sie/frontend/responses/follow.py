"""Streams a stored response again from any event on, while it runs or later. Must not depend on the process that runs it.

Another process may run the response. So the events come from the database, which is polled until the last event is there.
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
from sie.frontend.responses.response_store import Followed
from sie.values.errors import NotFound, SieError
from sie.values.generate import GenerateEvent, Started
from sie.values.inference import Timing

POLL_S: Final = 0.25
"""Time between two polls of the database."""
_MAX_LATE_POLLS: Final = 8
"""Number of polls for the last event after a response has ended; a cancelled job notices its cancellation late."""
_NEW_DATA: Final[list[GenerateEvent]] = [Started(0, 0)]
"""A marker that new data can be written."""
Read = Callable[[int], Awaitable[Followed | None]]
"""Returns the response with the events after this number, or None if it was deleted."""


class ResponseFollower:
    """Reads one stream. Implements both `EventSource` and `EventWriter` of `sie.frontend.http.stream`."""

    keep_alive = text_fields.KEEP_ALIVE

    def __init__(self, read: Read, after: int, pool: ThreadPoolExecutor) -> None:
        """Follow a stream. after is the last event number that the client has, or -1; pool is for large responses."""
        self.is_over = False
        self._read = read
        self._after = after
        self._pool = pool
        self._num_late_polls = 0
        self._data = b""

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return a marker for new events, or an empty list after timeout_s. Raises if the events cannot be read."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        while True:
            events = await self._next()
            if events or self.is_over:
                self._after += len(events)
                self._data = b"".join(events)
                return _NEW_DATA
            left_s = ends_s - loop.time()
            if left_s <= 0:
                return []
            await asyncio.sleep(min(POLL_S, left_s))

    def write(self, events: Sequence[GenerateEvent]) -> bytes:  # the protocol's
        """Return the data of the last `wait`."""
        data, self._data = self._data, b""
        return data

    def write_error(self, error: SieError) -> bytes:
        """Return an error event. Its number is that of the first event that could not be read."""
        made = text_fields.error_object(error)
        fields = {"code": made["code"], "message": error.message, "param": made["param"]}
        return text_fields.named_event("error", {"sequence_number": self._after + 1, **fields})

    def give_up(self, error: SieError) -> None:  # the protocol's
        """Do nothing: the response runs on without its readers."""

    def timing(self, began_ns: int) -> Timing | None:  # the protocol's
        """Return None: a replay has no inference timing of its own."""
        return None

    def usage(self) -> None:  # the protocol's
        """Return None: the tokens of a replay were counted when they were made."""
        return

    async def _next(self) -> list[bytes]:
        """Return the new events, and record whether the last one is among them."""
        found = await self._read(self._after)
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
        """Return the last events of a stream whose response has ended: none if the client has them, or replacements.

        A cancelled response may still write its last events, so the first few calls return nothing.
        """
        self._num_late_polls += 1
        if found.status == "cancelled" and self._num_late_polls < _MAX_LATE_POLLS:
            return []
        self.is_over = True
        whole = await self._read(-1)
        is_ended = whole is not None and bool(whole.events) and is_terminal(whole.events[-1])
        return [] if is_ended else end_events(found.body, self._after + 1)


def not_kept() -> SieError:
    """Return the error for a stream whose events are not stored any more."""
    text = "The stream of this response cannot be read again: its events took more than max_response_stream_bytes"
    return NotFound(text, code="STREAM_NOT_KEPT", extras={"param": "stream"})
