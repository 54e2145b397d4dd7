"""Owns a streamed answer: server-sent events from the first token to the last, comments between, a slow client's end.

The status waits for the first event, an error or the first keep-alive, so that a failure before has a status of its own;
one afterwards is an event. Source of the form: HTML standard, section 9.2 (server-sent events).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from sie.config.generation import Generation
from sie.frontend.http.backlog import Backlog
from sie.values.encode import Timing
from sie.values.errors import ClientGone, SieError
from sie.values.generate import GenerateEvent

Headers = list[tuple[str, str]]
STREAM_HEADERS: Final = (("content-type", "text/event-stream"), ("cache-control", "no-cache"))


class EventWriter(Protocol):
    """How a dialect writes a stream. What it returns may be empty: then nothing is sent."""

    keep_alive: bytes
    """What is sent when nothing happened for a while."""

    def write(self, events: Sequence[GenerateEvent]) -> bytes:
        """Return the next events' bytes; behind `Ended` nothing is asked for any more."""
        ...

    def write_error(self, error: SieError) -> bytes:
        """Return the bytes of an error that ends the stream."""
        ...


class EventSource(Protocol):
    """Where a stream's events come from: a `Run`, or what follows one."""

    @property
    def is_over(self) -> bool:
        """Whether the last event was taken."""
        ...

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or none when timeout_s passes first. Raises what ended them."""
        ...

    def give_up(self, error: SieError) -> None:
        """Hear that nobody takes any more, and why."""
        ...

    def timing(self, began_ns: int) -> Timing | None:
        """Return where the time went, as `Run.timing` does; None before anything was submitted."""
        ...


class Streamed(NamedTuple):
    """An answer that is to be streamed."""

    run: EventSource
    writer: EventWriter


async def send_stream(
    answer: Streamed, open_response: Callable[[], Any], client: str, settings: Generation
) -> SieError | None:
    """Send a whole stream; return what it was ended by before its end, if anything was.

    open_response sends the status and headers and returns Granian's transport. Raises what fails before that, so that it
    gets a status. Whoever leaves, or lets more than stream_backlog_bytes pile up, ends the work.
    """
    run, writer = answer
    backlog = Backlog(client, settings.stream_backlog_bytes)
    transport: Any = None
    try:
        while not run.is_over:
            error = None
            try:
                events = await run.wait(settings.keep_alive_interval_ms / 1e3)
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
                return error.with_traceback(None)  # which would hold on to all of this, the response among it
            if backlog.add(len(data)):
                backlog.cut()
                return ClientGone("the client let more than stream_backlog_bytes pile up")
        return None
    finally:
        transport = None  # Granian ends the response when nobody holds it any more
        if not run.is_over:
            run.give_up(ClientGone("the answer's stream ended"))


async def _try_send(transport: Any, data: bytes) -> bool:
    """Hand bytes over; False when the connection is closed."""
    try:
        await transport.send_bytes(data)
    except RuntimeError:  # Granian's ProtocolClosed
        return False
    return True
