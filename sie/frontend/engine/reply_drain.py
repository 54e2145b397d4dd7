"""Reads the workers' descriptors: each ends its request or feeds its stream. Also measures how fast answers come back.

Each descriptor is checked here before its request is settled. A request with an unreadable reply waits like the
worker's others, until the supervisor has ended that worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from sie.frontend.engine.hedging import unpair
from sie.frontend.engine.worker_link import ShmPending, ShmReply, WorkerLink, read_error
from sie.ipc.messages import ModelEntry
from sie.shm.layout import ERROR, REPLY, TOKENS, Descriptor, ProtocolError
from sie.values.errors import DeadlineExceeded, SieError
from sie.values.generate import TokenFrame
from sie.values.work_bytes import read_extent

_frame_decoder: Final = msgspec.msgpack.Decoder(TokenFrame)
_RATE_WEIGHT = 0.2
_MIN_RATE_SPAN_S = 0.5


class ReplyDrain:
    """Reads what the workers of one engine answer. `requeue` is called with a request that must wait for a worker again."""

    def __init__(self, find_model: Callable[[str], ModelEntry | None], requeue: Callable[[ShmPending], None]) -> None:
        self._find_model = find_model
        self._requeue = requeue
        self._tokens_done = 0
        self.measured_ns = time.monotonic_ns()
        self.tokens_per_s = 0.0
        """The rate at which answers come back, smoothed. `Retry-After` is computed from it."""

    def drain(self, link: WorkerLink) -> None:
        """Handle all descriptors that a worker has sent. Raises ProtocolError for an invalid one."""
        now_ns = time.monotonic_ns()
        for descriptor in link.attachment.drain():
            self._on_descriptor(link, descriptor, now_ns)

    def measure(self, now_ns: int, *, is_busy: bool) -> None:
        """Take a sample of the rate, at most twice a second. The rate of an idle server stays unchanged."""
        elapsed_s = (now_ns - self.measured_ns) / 1e9
        if elapsed_s < _MIN_RATE_SPAN_S:
            return
        rate = self._tokens_done / elapsed_s
        if rate or is_busy:
            self.tokens_per_s += _RATE_WEIGHT * (rate - self.tokens_per_s) if self.tokens_per_s else rate
        self._tokens_done, self.measured_ns = 0, now_ns

    def _on_descriptor(self, link: WorkerLink, descriptor: Descriptor, now_ns: int) -> None:
        if descriptor.kind not in (REPLY, ERROR):
            self._on_tokens(link, descriptor, now_ns)
            return
        pending = link.pending.get(descriptor.request_id)
        if pending is None:
            raise ProtocolError(f"a reply to request {descriptor.request_id}, which is not outstanding")
        view = link.attachment.view(descriptor) if descriptor.length else None
        link.settle(pending)
        if descriptor.kind == REPLY:
            link.record_answer(pending, now_ns)
        self._tokens_done += pending.num_tokens
        if view is None:
            end(pending, DeadlineExceeded("the worker dropped the request at its deadline"))
            return
        reply = ShmReply(link, pending, descriptor.offset, view)
        if descriptor.kind == ERROR:
            self._on_error(pending, read_error(reply))
        elif pending.future.done():
            reply.release()
            pending.lease.end()
        else:
            pending.lease.end()
            pending.future.set_result(reply)

    def _on_tokens(self, link: WorkerLink, descriptor: Descriptor, now_ns: int) -> None:
        """Feed the tokens of one or more steps to their streams, and release the extent at once."""
        if descriptor.kind != TOKENS:
            raise ProtocolError(f"a worker sent kind {descriptor.kind}")
        records = read_extent(link.attachment.view(descriptor), _frame_decoder)[0].records
        link.release(descriptor.offset)
        for record in records:
            pending = link.pending.get(record.request_id)
            if pending is None or pending.stream is None:
                raise ProtocolError(f"tokens for request {record.request_id}, which is not an outstanding stream")
            pending.stream.feed(record, now_ns)

    def _on_error(self, pending: ShmPending, error: SieError) -> None:
        """End the request with a worker's error, unless another worker may still answer.

        A retryable error of one worker is ignored while another worker has the same request. MODEL_NOT_LOADED while the
        model is being restored means that an unload or a restart overtook the request, so it waits again.
        """
        if pending.rival is not None and error.retryable and not pending.future.done():
            unpair(pending)
            pending.lease.end()
            return
        entry = self._find_model(pending.model)
        is_coming_back = error.code == "MODEL_NOT_LOADED" and entry is not None and entry.recovering
        if is_coming_back and not pending.future.done() and pending.may_run_again():
            self._requeue(pending)
        else:
            end(pending, error)


def end(pending: ShmPending, error: SieError) -> None:
    """End a request that is not at a worker any more: its lease, and its client's wait with this error."""
    pending.lease.end()
    if not pending.future.done():
        pending.future.set_exception(error)


def overdue(pending: ShmPending) -> SieError:
    """Return the error for a request whose deadline passed."""
    if pending.stream is not None:
        return pending.stream.overdue()
    return DeadlineExceeded("the request's deadline passed before its answer was there")
