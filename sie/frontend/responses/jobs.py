"""Runs one response in its own task, and passes its events to a client's stream. Must end every stream that follows it.

The task runs independently. So a background response outlives its client, and any client can cancel it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sie.frontend.dialects.responses.reply import CANCELLED, ResponseRecord
from sie.frontend.generation.reply_size import events_bytes
from sie.frontend.http.stream import EventSource
from sie.frontend.http.threads import offload
from sie.runtime.ends_of_work import ENDS_OF_WORK
from sie.runtime.event_queue import EventQueue
from sie.runtime.logs import get_logger
from sie.values.errors import BadRequest, ClientGone, Internal, SieError, Unavailable
from sie.values.generate import GenerateEvent, GenerateUsage
from sie.values.inference import Timing

_log = get_logger(__name__)
_MAX_WAIT_S: Final = 86_400.0
"""Bound of one wait. The engine enforces the deadlines of requests."""


def cancelled() -> SieError:
    """Return the error that stops a cancelled response."""
    return BadRequest("The response was cancelled", code=CANCELLED)


class Follower:
    """The events of one job for one stream; implements `sie.frontend.http.stream.EventSource`."""

    def __init__(self, on_gone: Callable[[], None], *, counts_usage: bool = True) -> None:
        self.queue = EventQueue()
        self.run: EventSource | None = None
        """The followed run, once it was submitted."""
        self._counts_usage = counts_usage
        self._on_gone = on_gone

    @property
    def is_over(self) -> bool:
        """Whether the last event was taken."""
        return self.queue.is_over

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s. Raises the job's error after the last events."""
        return await self.queue.take(timeout_s)

    def give_up(self, error: SieError) -> None:  # the protocol's
        """Stop following the job, because the client left or the job is over."""
        self.queue.drop()
        self._on_gone()

    def timing(self, began_ns: int) -> Timing | None:
        """Return the timing of the run, or None before it was submitted."""
        return self.run.timing(began_ns) if self.run is not None else None

    def usage(self) -> GenerateUsage | None:
        """Return the usage of the run; None before it was submitted, and if the job counts it itself."""
        return self.run.usage() if self.run is not None and self._counts_usage else None


class Job:
    """One response under way. keep stores it at its end, and is awaited before the stream gets its last event.

    A thread of the pool applies a large answer to the record.
    """

    def __init__(
        self, record: ResponseRecord, owner: str, keep: Callable[[ResponseRecord], Awaitable[None]],
        pool: ThreadPoolExecutor, *, outlives: bool,
    ) -> None:  # fmt: skip
        self.record = record
        self.owner = owner
        """The name of the API key that requested it."""
        self.outlives = outlives
        """Whether the job runs on after its client has left."""
        self.follower = Follower(self._on_gone, counts_usage=not outlives)
        self._keep = keep
        self._pool = pool
        self._is_ending = False
        self._why: SieError | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, list[GenerateEvent]], on_end: Callable[[], object]) -> None:
        """Run work in its own task. work returns the last events."""
        self._task = asyncio.get_running_loop().create_task(self._make(work))
        self._task.add_done_callback(lambda _task: on_end())

    def stop(self, error: SieError) -> None:
        """Stop the job with this error, unless it is already ending. The workers drop its sequences."""
        if self._is_ending or self._task is None or self._why is not None:
            return
        self._why = error
        self._task.cancel()

    async def stream(self, run: EventSource) -> list[GenerateEvent]:
        """Pass on the events of a run as they arrive, except the last ones, which are returned."""
        self.follower.run = run
        try:
            while True:
                events = await run.wait(_MAX_WAIT_S)
                if run.is_over:
                    return events
                self.record.apply(events, int(time.time()))
                self.follower.queue.push(*events)
        finally:
            run.give_up(self._why or cancelled())

    async def _make(self, work: Coroutine[Any, Any, list[GenerateEvent]]) -> None:
        error: SieError | None = None
        last: list[GenerateEvent] = []
        try:
            last = await work
        except asyncio.CancelledError:
            error = self._why or Unavailable("The server is stopping", code="SHUTTING_DOWN")
        except ClientGone:  # the watcher of the connection may notice before the stream does
            error = cancelled()
        except SieError as raised:
            error = raised
        except ENDS_OF_WORK:
            raise
        except BaseException:
            _log.exception("response %s failed", self.record.id)
            error = Internal("internal error")
        self._is_ending = True
        await offload(self._pool, events_bytes(last), self.record.apply, last, int(time.time()))
        if error is not None:
            self.record.fail(error)
        try:
            await self._keep(self.record)
        finally:  # a follower must not wait for ever
            self.follower.queue.push(*last)
            self.follower.queue.end(error)

    def _on_gone(self) -> None:
        self.record.is_followed = False
        self.record.take_stream()
        if not self.outlives:
            self.stop(cancelled())
