"""Hands the events of a run to its one reader, in order, and then the error that ended it."""

from __future__ import annotations

import asyncio

from sie.values.errors import SieError, untied
from sie.values.generate import GenerateEvent


class EventQueue:
    """Events on their way from a run to the writer of its stream."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the last event was taken."""
        self._events: list[GenerateEvent] = []
        self._is_ended = self._is_dropped = False
        self._error: SieError | None = None
        self._changed = asyncio.Event()

    def push(self, *events: GenerateEvent) -> None:
        """Add events."""
        if not self._is_dropped:
            self._events += events
            self._changed.set()

    def end(self, error: SieError | None = None) -> None:
        """End the events, with an error or None. Only the first end counts."""
        if not self._is_ended:
            self._is_ended, self._error = True, error and untied(error)
            self._changed.set()

    def drop(self) -> None:
        """Forget the events, also those to come: nobody takes them any more."""
        self._is_dropped, self._events = True, []

    async def take(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s. Raises the error after the last events."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._events and not self._is_ended:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return []
        events, self._events = self._events, []
        if not events and self._error is not None:
            self.is_over = True
            raise untied(self._error)
        self.is_over = self._is_ended and self._error is None
        return events
