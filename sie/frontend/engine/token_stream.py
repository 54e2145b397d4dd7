"""Carries the tokens of one request from an engine to the request's handler, and reports when they are overdue.

A worker's records are checked as they come: each choice's in order, none missing, none after its last. If a
worker dies before anything was sent to the client, the stream starts again. Later it ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from sie.values.errors import DeadlineExceeded, ProtocolError, SieError
from sie.values.generate import GenerateTotals, TokenRecord
from sie.values.work_bytes import read_extent

if TYPE_CHECKING:
    import asyncio


class StreamReply(Protocol):
    """The part of a reply that a stream reads (`sie.frontend.engine.interface.Reply`)."""

    view: memoryview

    def release(self) -> None: ...


class StreamRequest(Protocol):
    """The part of a submitted request that its stream uses (`sie.frontend.engine.interface.Pending`)."""

    deadline_ns: int
    future: asyncio.Future[Any]

    def stop(self, choice: int) -> None: ...


_totals_decoder: Final = msgspec.msgpack.Decoder(GenerateTotals)
_ENDED: Final = -1


class StreamTimes(msgspec.Struct, frozen=True):
    """How long a stream may pause, and last from its first token to its last."""

    idle_ns: int
    total_ns: int


class TokenStream:
    """The records from one request's worker that its handler has not taken yet.

    on_news is called whenever `take` has a new record to return or an error to raise.
    """

    def __init__(self, num_choices: int, times: StreamTimes, on_news: Callable[[], None]) -> None:
        self._num_sent = [0] * num_choices
        self._times = times
        self._on_news = on_news
        self._records: list[TokenRecord] = []
        self._pending: StreamRequest | None = None
        self._ends_ns = 0
        self.first_ns = 0
        """The arrival time of the first token; 0 before it."""
        self.is_sent = False
        """Whether the client was sent anything; its handler says so."""
        self.num_restarts = 0
        """The number of restarts: each makes all earlier records void, since another worker begins again."""
        self.totals: GenerateTotals | None = None
        """The worker's totals for the request, once it is over."""

    def join(self, pending: StreamRequest) -> None:
        """Attach this stream to a submitted request."""
        self._pending = pending
        pending.future.add_done_callback(self._on_end)

    def take(self) -> list[TokenRecord]:
        """Return the records since the last call. Raises the error that ended the request once no record is left."""
        self.raise_early()
        records, self._records = self._records, []
        return records

    def raise_early(self) -> None:
        """Raise the error that ended the request if no record is left."""
        future = self._pending.future if self._pending is not None else None
        if not self._records and future is not None and future.done() and (error := future.exception()) is not None:
            raise error

    @property
    def is_over(self) -> bool:
        """Whether `take` has returned every record, and no more will come."""
        return not self._records and self._pending is not None and self._pending.future.done()

    # --- the engine's side ----------------------------------------------------------------------------------------

    def feed(self, record: TokenRecord, now_ns: int) -> None:
        """Store a record for `take`. Raises ProtocolError for a record out of order."""
        pending, choice = self._pending, record.choice
        if not 0 <= choice < len(self._num_sent) or record.index != self._num_sent[choice]:
            raise ProtocolError(f"tokens of choice {choice} from number {record.index} on, out of order")
        self._num_sent[choice] = _ENDED if record.finish else record.index + len(record.token_ids)
        if pending is None or pending.future.done():
            return
        if not self.first_ns:
            self.first_ns, self._ends_ns = now_ns, now_ns + self._times.total_ns
        pending.deadline_ns = min(now_ns + self._times.idle_ns, self._ends_ns)
        self._records.append(record)
        self._on_news()

    def try_restart(self, now_ns: int) -> bool:
        """Drop all records because another worker begins again. Returns False if the client was already sent some."""
        if self.is_sent:
            return False
        if self.first_ns and self._pending is not None:
            self._pending.deadline_ns = min(now_ns + self._times.idle_ns, self._ends_ns)
        self._num_sent = [0] * len(self._num_sent)
        self._records = []
        self.num_restarts += 1
        return True

    def overdue(self) -> SieError:
        """Return the error for a stream past its deadline."""
        if not self.first_ns:
            return DeadlineExceeded("the request's deadline passed before its first token was there")
        pending = self._pending
        if pending is not None and pending.deadline_ns >= self._ends_ns:
            return DeadlineExceeded("the answer took longer than generation_timeout_s")
        return DeadlineExceeded("no token came for stream_idle_timeout_s")

    def stop(self, choice: int) -> None:
        """Ask for no more tokens of a choice."""
        if self._pending is not None:
            self._pending.stop(choice)

    def _on_end(self, future: asyncio.Future[StreamReply]) -> None:
        if not future.cancelled() and future.exception() is None:
            reply = future.result()
            try:
                self.totals, _ = read_extent(reply.view, _totals_decoder)
            except ProtocolError:
                self.totals = None  # the records have the tokens; only the totals are lost
            finally:
                reply.release()
        self._on_news()
