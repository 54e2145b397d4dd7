"""Owns a response while it is made: the task that makes it, and what its client sees of it as a stream.

The task goes on by itself, so a response in the background outlives its client, and whoever stops it need not be the
one who asked for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from sie.frontend.dialects.responses.reply import CANCELLED, ResponseRecord
from sie.frontend.generation.run import Run
from sie.runtime.logs import get_logger
from sie.values.encode import Timing
from sie.values.errors import BadRequest, ClientGone, Internal, SieError, Unavailable
from sie.values.generate import GenerateEvent

_log = get_logger(__name__)
_LONG_S: Final = 86_400.0
"""The engine ends what takes too long; this only bounds one wait."""


def cancelled() -> SieError:
    """Return what a response is stopped with."""
    return BadRequest("The response was cancelled", code=CANCELLED)


class Follower:
    """What a stream takes a job's events from; see `sie.frontend.http.stream.EventSource`."""

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self.is_over = False
        self.run: Run | None = None
        """What is followed, once it was submitted."""
        self._on_gone = on_gone
        self._events: list[GenerateEvent] = []
        self._is_let_go = False
        self._is_ended = False
        self._error: SieError | None = None
        self._news = asyncio.Event()

    def push(self, events: list[GenerateEvent]) -> None:
        """Have more events, for as long as anybody takes them."""
        if not self._is_let_go:
            self._events += events
            self._news.set()

    def end(self, error: SieError | None) -> None:
        """Have no more, and end with this error, if any."""
        self._is_ended, self._error = True, error
        self._news.set()

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or none when timeout_s passes first. Raises what ended the job, after those before."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._events and not self._is_ended:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return []
        events, self._events = self._events, []
        if not events and self._error is not None:
            self.is_over = True
            raise self._error
        self.is_over = self._is_ended and self._error is None
        return events

    def give_up(self, error: SieError) -> None:  # the protocol's
        """Let go of the job, because its client left or it is over."""
        self._is_let_go, self._events = True, []
        self._on_gone()

    def timing(self, began_ns: int) -> Timing | None:
        """Return where the time went; None before anything was submitted."""
        return self.run.timing(began_ns) if self.run is not None else None


class Job:
    """One response that is being made. keep is awaited at its end, before a stream has its last event."""

    def __init__(
        self, record: ResponseRecord, owner: str, keep: Callable[[ResponseRecord], Awaitable[None]], *, outlives: bool
    ) -> None:
        self.record = record
        self.owner = owner
        """Name of the API key that asked for it."""
        self.outlives = outlives
        """Whether it goes on without the client that follows it."""
        self.follower = Follower(self._on_gone)
        self._keep = keep
        self._is_ending = False
        self._why: SieError | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, list[GenerateEvent]], on_end: Callable[[], object]) -> None:
        """Begin to work in a task of its own. The events that work returns are the last ones."""
        self._task = asyncio.get_running_loop().create_task(self._make(work))
        self._task.add_done_callback(lambda _task: on_end())

    def stop(self, error: SieError) -> None:
        """End it with this error, unless it ends already; the workers go on with nothing of it."""
        if self._is_ending or self._task is None or self._why is not None:
            return
        self._why = error
        self._task.cancel()

    async def stream(self, run: Run) -> list[GenerateEvent]:
        """Pass on the events of a run as they come, but for the last ones, which are returned."""
        self.follower.run = run
        try:
            while True:
                events = await run.wait(_LONG_S)
                if run.is_over:
                    return events
                self.record.apply(events, int(time.time()))
                self.follower.push(events)
        finally:
            run.give_up(self._why or cancelled())

    async def _make(self, work: Coroutine[Any, Any, list[GenerateEvent]]) -> None:
        error: SieError | None = None
        last: list[GenerateEvent] = []
        try:
            last = await work
        except asyncio.CancelledError:
            error = self._why or Unavailable("The server is stopping", code="SHUTTING_DOWN")
        except ClientGone:  # whoever watches its connection may see it before the stream does
            error = cancelled()
        except SieError as raised:
            error = raised
        except Exception:
            _log.exception("response %s failed", self.record.id)
            error = Internal("internal error")
        self._is_ending = True
        self.record.apply(last, int(time.time()))
        if error is not None:
            self.record.fail(error)
        try:
            await self._keep(self.record)
        finally:  # whoever follows must not wait for ever
            self.follower.push(last)
            self.follower.end(error)

    def _on_gone(self) -> None:
        self.record.is_followed = False
        self.record.take_stream()
        if not self.outlives:
            self.stop(cancelled())
