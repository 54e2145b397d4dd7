"""The frontend's end of one attachment: requests out, replies in, and the requests outstanding on that worker."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from sie.frontend.engine.quarantine import digest_of
from sie.frontend.engine.token_stream import TokenStream
from sie.runtime import failpoints
from sie.shm.attach import Attachment
from sie.shm.extent import clear_stopped, set_cancelled, set_stopped
from sie.shm.layout import SUBMIT, ProtocolError
from sie.shm.pool import Lease
from sie.values.errors import Internal, SieError, WireError, from_wire
from sie.values.work_bytes import read_extent

_MAX_STAGED: Final = 8
"""After this many requests in one turn of the event loop the bell is rung at once: the worker begins meanwhile."""
_MAX_KEPT_RELEASES: Final = 8
_PACE_WEIGHT: Final = 0.05
_LARGE_REPLY_BYTES: Final = 64 * 1024
_error_decoder: Final = msgspec.msgpack.Decoder(WireError)


class ShmPending(msgspec.Struct, eq=False):  # a Struct is made in a third of the time: one for each request
    """One submitted request until its terminal reply.

    The lease outlives the client: a time-out or a disconnect ends the future, but only a terminal descriptor, or the
    worker's proven death, ends the lease. num_deaths counts workers that died in a step with this request in it. A
    request to generate has a stream, which takes its tokens and, when it comes, its reply. rival is the same request at
    another worker (`sie.frontend.engine.hedging`).
    """

    request_id: int
    model: str
    lease: Lease
    length: int
    num_tokens: int
    deadline_ns: int
    submitted_ns: int
    future: asyncio.Future[ShmReply]
    adapter: str = ""
    stream: TokenStream | None = None
    link: WorkerLink | None = None
    rival: ShmPending | None = None
    num_deaths: int = 0
    flags: int = 0
    sent_ns: int = 0
    tokens_at_worker: int = 0
    """The outstanding tokens of its worker when it was sent, with its own."""

    @property
    def is_at_worker(self) -> bool:
        """Whether a worker has it now."""
        return self.link is not None and self.request_id in self.link.pending

    async def reply(self) -> ShmReply:
        """Wait for the reply, which the caller releases. Raises the error that ended the request.

        If the caller is cancelled, the worker is told not to run the request. A caller that is cancelled in the turn in
        which the reply arrives never gets it, so it is released here. Await a reply only by this method: awaiting the
        bare future would drop it, and its extent would stay leased for ever.
        """
        future = self.future
        try:
            return await future
        except BaseException:
            if future.cancelled():
                if self.is_at_worker:
                    set_cancelled(self.lease.view)
            elif future.done() and future.exception() is None:
                future.result().release()
            raise

    def digest(self) -> bytes:
        """Return the identity of this request's input."""
        return digest_of(self.lease.view[: self.length])

    def may_run_again(self) -> bool:
        """Return whether another worker may run it from the start. Resets its stream for that."""
        if self.stream is None:
            return True
        if not self.stream.try_restart(time.monotonic_ns()):
            return False
        clear_stopped(self.lease.view)
        return True

    def stop(self, choice: int) -> None:
        """Ask the worker, if one has the request, to stop generating a choice."""
        if self.is_at_worker:
            set_stopped(self.lease.view, choice)


class ShmReply:
    """A terminal reply's extent, read-only. `release` gives it back to the worker, once, after its bytes were copied.

    It must not refer to its `ShmPending`, whose future holds this reply. Only the garbage collector would free such a
    cycle, and it runs so rarely that thousands of requests would pile up.
    """

    __slots__ = ("_address", "_link", "num_tokens", "submitted_ns", "view")

    def __init__(self, link: WorkerLink, pending: ShmPending, address: int, view: memoryview) -> None:
        self._link = link
        self._address = address
        self.num_tokens = pending.num_tokens
        self.submitted_ns = pending.submitted_ns
        self.view = view

    def release(self) -> None:
        """Let the worker use the extent again."""
        failpoints.reach("frontend.before_release")
        nbytes = len(self.view)
        self.view = _EMPTY
        self._link.release(self._address, nbytes)


class WorkerLink:
    """The engine's record of one worker."""

    def __init__(
        self,
        slot: int,
        attachment: Attachment,
        on_fault: Callable[[WorkerLink, ProtocolError], None],
        needs_cores: Callable[[int], bool] = lambda _slot: False,
    ) -> None:
        """on_fault is called when a worker breaks the protocol while descriptors are published.

        needs_cores tells whether the worker of a slot uses its cores now, for anybody.
        """
        self._on_fault = on_fault
        self._needs_cores = needs_cores
        self.slot = slot
        self.attachment = attachment
        self.pending: dict[int, ShmPending] = {}
        self.outstanding_tokens = 0
        self.stream_bytes = 0
        """Request memory of its requests that generate."""
        self._num_streams: Counter[str] = Counter()
        self.pace_ns = 0.0
        """Time from sending to the answer for each token that was outstanding then, smoothed; 0: no answer yet."""
        self.slowness = 1.0
        """Its pace in comparison with the fastest worker's; the engine sets it."""
        self.is_alive = True
        self.is_late = False
        """Whether its step is over its allowance by more than a second, as the supervisor reported."""
        self.late_step: frozenset[int] = frozenset()
        """The requests of that step."""
        self._releases: list[int] = []
        self._num_staged = 0
        self._flush_due = False

    @property
    def generation(self) -> int:
        """The number of this attachment; unique over all attachments of the server."""
        return self.attachment.generation

    def try_submit(self, pending: ShmPending) -> bool:
        """Hand over one request; return False if the ring is full. `_flush_soon` describes when the worker is woken."""
        staged = self.attachment.stage(
            SUBMIT, pending.flags, pending.request_id, pending.lease.address, pending.length,
            pending.deadline_ns, pending.num_tokens,
        )  # fmt: skip
        if staged:
            pending.link = self
            self.pending[pending.request_id] = pending
            self._count(pending, 1)
            pending.sent_ns, pending.tokens_at_worker = time.monotonic_ns(), self.outstanding_tokens
            self._num_staged += 1
            if self._num_staged >= _MAX_STAGED:
                self._publish()
            elif not self._flush_due:
                self._flush_soon()
        return staged

    def record_answer(self, pending: ShmPending, now_ns: int) -> None:
        """Update the pace with a request that was answered; streams take as long as their clients asked for."""
        if pending.stream is None and pending.tokens_at_worker:
            pace_ns = (now_ns - pending.sent_ns) / pending.tokens_at_worker
            self.pace_ns += _PACE_WEIGHT * (pace_ns - self.pace_ns) if self.pace_ns else pace_ns

    def count_streams(self, model: str) -> int:
        """Return how many of its requests generate with a model."""
        return self._num_streams[model]

    @property
    def is_free(self) -> bool:
        """Whether nobody has work for it, so that it lends its cores."""
        return not self.outstanding_tokens and not self._needs_cores(self.slot)

    def settle(self, pending: ShmPending) -> None:
        """Remove a request from `pending`, and its tokens from the outstanding ones."""
        del self.pending[pending.request_id]
        self._count(pending, -1)

    def _count(self, pending: ShmPending, change: int) -> None:
        self.outstanding_tokens += change * pending.num_tokens
        if pending.stream is not None:
            self.stream_bytes += change * pending.lease.nbytes
            self._num_streams[pending.model] += change
            if not self._num_streams[pending.model]:
                del self._num_streams[pending.model]  # models come and go

    def release(self, address: int, nbytes: int = 0) -> None:
        """Release a reply's extent together with the next request: alone it would wake the worker for nothing.

        A large extent, or many small ones, go back at once: the worker may be short of memory.
        """
        if not self.is_alive:
            return
        self._releases.append(address)
        if not self._flush_due and (nbytes >= _LARGE_REPLY_BYTES or len(self._releases) >= _MAX_KEPT_RELEASES):
            self._flush_soon()

    def give_back(self) -> None:
        """Release the extents that did not leave with a request; called by the process's tick."""
        if self._releases and self.is_alive and not self._flush_due:
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Ring the worker's bell once for this turn of the event loop: each ring is a system call and wakes it."""
        self._flush_due = True
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        releases, self._releases = self._releases, []
        if self.is_alive:
            self._publish(releases)

    def _publish(self, releases: Sequence[int] = ()) -> None:
        self._num_staged = 0
        try:
            if releases:
                self.attachment.push_release(releases)
            self.attachment.publish()
        except ProtocolError as error:
            self._on_fault(self, error)


_EMPTY: Final = memoryview(b"")


def read_error(reply: ShmReply) -> SieError:
    """Return the error from a worker's reply, and release its extent."""
    try:
        wire, _ = read_extent(reply.view, _error_decoder)
        return from_wire(wire)
    except ProtocolError:
        return Internal("the worker's error could not be read")
    finally:
        reply.release()
