"""Sends a streamed answer as server-sent events with keep-alives. Must never let a slow client's backlog grow unbounded.

The status is sent with the first event, error event or keep-alive. An earlier failure gets its own status; a later one
becomes an event. Source of the format: HTML standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Final, NamedTuple, Protocol

from sie.frontend.http.unread import Unread
from sie.values.errors import ClientGone, SieError
from sie.values.generate import GenerateEvent, GenerateUsage, PromptScored
from sie.values.inference import Timing

STREAM_HEADERS: Final = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))


class EventWriter(Protocol):
    """Encodes the stream of one dialect. An empty result is not sent."""

    keep_alive: bytes
    """The bytes to send after a while without events."""

    def write(self, events: Sequence[GenerateEvent]) -> bytes:
        """Return the bytes of the next events. Not called again after `Ended`."""
        ...

    def write_error(self, error: SieError) -> bytes:
        """Return the bytes of an error that ends the stream."""
        ...


class EventSource(Protocol):
    """The source of a stream's events: a `Run`, or a follower of one."""

    @property
    def is_over(self) -> bool:
        """Whether the last event was taken."""
        ...

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s. Raises the error that ended the stream."""
        ...

    def give_up(self, error: SieError) -> None:
        """Abandon the stream, because of error."""
        ...

    def timing(self, began_ns: int) -> Timing | None:
        """Return the timing as `Run.timing` does, or None before the request was submitted."""
        ...

    def usage(self) -> GenerateUsage | None:
        """Return the usage so far, or None if this stream does not count it."""
        ...


class Streamed(NamedTuple):
    """An answer that must be streamed."""

    run: EventSource
    writer: EventWriter
    headers: Sequence[tuple[str, str]] = ()
    """The headers to send besides those of every stream."""
    pool: Executor | None = None
    """Its threads write the log probabilities of prompts; None for a stream that never has them."""


async def send_stream(
    answer: Streamed, open_response: Callable[[], Any], unread: Unread, keep_alive_s: float
) -> SieError | None:
    """Send a complete stream. Return the error that ended it early, or None.

    open_response sends the status and headers and returns Granian's transport. Errors before that are raised, so that
    they get a status. unread counts the bytes. The run is given up if the client leaves or too much of it is unread.
    """
    run, writer = answer.run, answer.writer
    transport: Any = None
    try:
        while not run.is_over:
            error = None
            try:
                events = await run.wait(keep_alive_s)
                if answer.pool is not None and any(isinstance(event, PromptScored) for event in events):
                    data = await asyncio.get_running_loop().run_in_executor(answer.pool, writer.write, events)
                else:
                    data = writer.write(events) if events else writer.keep_alive
            except SieError as raised:
                if transport is None:
                    raise
                error = raised
                data = b"" if isinstance(raised, ClientGone) else writer.write_error(raised)
            transport = transport if transport is not None else open_response()
            if data and not await _try_send(transport, data):
                return ClientGone("the client left while its answer was streamed")
            if error is not None:
                # A traceback would keep these frames alive, and with them the response.
                return error.with_traceback(None)
            if unread.add(len(data)):
                unread.cut()
                return ClientGone("the client left more than stream_backlog_bytes unread")
        return None
    finally:
        transport = None  # Granian ends the response when the last reference is dropped
        if not run.is_over:
            run.give_up(ClientGone("the answer's stream ended"))


async def _try_send(transport: Any, data: bytes) -> bool:
    """Send bytes; return False if the connection is closed."""
    try:
        await transport.send_bytes(data)
    except RuntimeError:  # Granian's ProtocolClosed
        return False
    return True
