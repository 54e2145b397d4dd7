"""Carries every request between operations and workers: submit, reply, resubmit after a death, hedge, abandon in time.

Operations know it as `sie.frontend.engine.interface.Engine`. A request's bytes lie in this frontend's own
segment, so a worker's death costs time and not the answer: its unanswered requests go, from the same bytes, to a live
worker. Without one they wait in `held` for the restart, until their deadlines. The unanswered requests of a late
worker go to another worker as well, as copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from numpy.typing import NDArray

from sie.config.limits import Limits
from sie.config.settings import Settings
from sie.frontend.engine import admission
from sie.frontend.engine.hedging import make_copy, may_run_twice, pair, unpair
from sie.frontend.engine.held import HeldRequests
from sie.frontend.engine.interface import Pending
from sie.frontend.engine.links import WorkerLinks, unwatch
from sie.frontend.engine.placement import choose_for_stream, choose_worker, max_gathered_tokens, measure_slowness
from sie.frontend.engine.quarantine import QuarantinedInputs, poison
from sie.frontend.engine.reply_drain import ReplyDrain, end, overdue
from sie.frontend.engine.request_layout import RequestLayout, lay_out, lay_out_once
from sie.frontend.engine.token_stream import TokenStream
from sie.frontend.engine.worker_link import ShmPending, WorkerLink
from sie.frontend.models.adapter_lookup import is_coming, loading, workers_with
from sie.ipc.messages import Detached, ModelEntry, PeerFault, Quarantine
from sie.runtime import failpoints
from sie.runtime.logs import get_logger
from sie.shm.attach import Attachment
from sie.shm.extent import set_cancelled, write_extent, write_parts, write_pieces
from sie.shm.layout import FLAG_ALONE, ProtocolError
from sie.shm.pool import Lease
from sie.shm.space import OutboundSpace
from sie.values.errors import ClientGone, InputTooLong, Overloaded, SieError, Unavailable, WorkerLost
from sie.values.work import WorkHeader

_log = get_logger(__name__)
_MAX_DEATHS = 2
_MAX_HEDGED_BYTES = 8 << 20
"""Most bytes of a late worker's requests to copy in one tick, one request excepted: about two milliseconds."""
_PIECE_BYTES = 1 << 20
"""Most bytes of a large payload to copy between two turns of the event loop: about a millisecond."""


class ShmEngine:
    """The engine of one frontend process. Everything runs on its event loop."""

    def __init__(
        self,
        settings: Settings,
        space: OutboundSpace,
        find_model: Callable[[str], ModelEntry | None],
        send: Callable[[Quarantine | PeerFault | Detached], None],
        *,
        streams_together: int = 0,
        needs_cores: Callable[[int], bool] = lambda _slot: False,
    ) -> None:
        """streams_together: put so many streams of a model on one worker while others are free; 0 spreads them.

        needs_cores tells whether the worker of a slot uses its cores now, for any process.
        """
        self._streams_together = streams_together
        self._limits = settings.limits
        self._max_per_link = settings.memory.ring_capacity // 2
        self._max_stream_bytes = settings.memory.request_segment_bytes // 2
        self._space = space
        self._find_model = find_model
        self._send = send
        self._workers = WorkerLinks(self._on_bell, send, needs_cores)
        self._links = self._workers.live
        self._held = HeldRequests()
        self._may_place = False
        """Whether a held request may find a worker without news of models or workers."""
        self._ids = itertools.count(1)
        self._quarantined = QuarantinedInputs()
        self._replies = ReplyDrain(find_model, self._requeue)

    # --- asking ---------------------------------------------------------------------------------------------------

    @property
    def num_pending(self) -> int:
        """Number of requests at a worker or waiting for one."""
        return len(self._held) + sum(len(link.pending) for link in self._workers)

    @property
    def num_extents(self) -> int:
        """Request extents under a lease."""
        return self._space.num_leased

    @property
    def queued_tokens(self) -> int:
        """Tokens submitted and not answered, over all workers."""
        return sum(link.outstanding_tokens for link in self._links.values())

    def queued_on(self, slots: Collection[int]) -> int:
        """Return the tokens at the workers in these slots."""
        return sum(link.outstanding_tokens for slot, link in self._links.items() if slot in slots)

    @property
    def tokens_per_s(self) -> float:
        """The rate at which answers come back, smoothed. `Retry-After` is computed from it."""
        return self._replies.tokens_per_s

    def reconfigure(self, limits: Limits) -> None:
        """Apply reloaded limits to requests submitted from now on."""
        self._limits = limits

    def check_open(self) -> None:
        """Refuse a request before its body is read if no worker could take even one more token.

        While no worker is attached, the requests that wait for one count. Raises Overloaded.
        """
        max_tokens = self._limits.max_queued_tokens
        for link in self._links.values():
            if link.outstanding_tokens < max_tokens:
                return
        if self._links or self._held.num_tokens >= max_tokens:
            raise self._overloaded("the queue holds max_queued_tokens")

    def submit(
        self, header: WorkHeader, arrays: Sequence[tuple[str, NDArray[Any]]], num_tokens: int, deadline_ns: int
    ) -> ShmPending:
        """Hand one request to a worker and return its record; await its `reply()`.

        arrays: those of the header's operation, by name. An `id:profile` in header.model becomes the model that workers
        know. Raises Overloaded if memory or the queue is full, PoisonInput for a quarantined input, Unavailable if no
        worker has the model.
        """
        layout = lay_out(header, arrays)
        with self._lease(layout) as lease:
            write_extent(lease.view, layout.header, layout.refs, [array for _, array in arrays])
            return self._hand_over(lease, layout, header.lora, num_tokens, deadline_ns)

    def submit_parts(
        self, layout: RequestLayout, parts: Sequence[bytes | memoryview], num_tokens: int, deadline_ns: int
    ) -> ShmPending:
        """Submit a request that already has a layout and whose arrays are bytes. Raises the errors of `submit`."""
        with self._lease(layout) as lease:
            write_parts(lease.view, layout.head, layout.places, parts)
            return self._hand_over(lease, layout, "", num_tokens, deadline_ns)

    async def submit_large(
        self, header: WorkHeader, arrays: Sequence[tuple[str, NDArray[Any]]], num_tokens: int, deadline_ns: int
    ) -> ShmPending:
        """Submit a request with megabytes of arrays: the event loop runs between copies. Raises the errors of `submit`."""
        layout = lay_out(header, arrays)
        with self._lease(layout) as lease:
            own = [array for _, array in arrays]
            for _ in write_pieces(lease.view, layout.header, layout.refs, own, _PIECE_BYTES):
                await asyncio.sleep(0)
            return self._hand_over(lease, layout, header.lora, num_tokens, deadline_ns)

    async def submit_stream(
        self,
        header: WorkHeader,
        arrays: Sequence[tuple[str, NDArray[Any]]],
        num_tokens: int,
        deadline_ns: int,
        stream: TokenStream,
    ) -> ShmPending:
        """Submit a request to generate, whose tokens go to stream. deadline_ns is the deadline of the first token.

        Such requests run long, so they get at most half of the request segment. Raises Overloaded over that half, and
        the errors of `submit`.
        """
        layout = lay_out_once(header, arrays)
        held = self._held.stream_bytes + sum(link.stream_bytes for link in self._workers)
        if held + layout.nbytes > self._max_stream_bytes:
            raise self._overloaded("half of the request memory holds prompts")
        with self._lease(layout) as lease:
            own = [array for _, array in arrays]
            for _ in write_pieces(lease.view, layout.header, layout.refs, own, _PIECE_BYTES):
                await asyncio.sleep(0)
            pending = self._hand_over(lease, layout, header.lora, num_tokens, deadline_ns, stream=stream)
        stream.join(pending)
        return pending

    def _lease(self, layout: RequestLayout) -> Lease:
        lease = self._space.lease(layout.nbytes)
        if lease is None and not self._space.can_hold(layout.nbytes):
            raise InputTooLong(
                f"The request takes {layout.nbytes} bytes of memory, more than one process may have (request_segment_bytes, "
                "or its share of max_large_bytes)",
                http_status=413,
            )
        if lease is None:
            raise self._overloaded("request memory is full")
        return lease

    def _hand_over(
        self, lease: Lease, layout: RequestLayout, adapter: str, num_tokens: int, deadline_ns: int,
        *, stream: TokenStream | None = None,
    ) -> ShmPending:  # fmt: skip
        """Submit a written request to a worker, or hold it until a worker is available."""
        pending = ShmPending(
            next(self._ids),
            layout.model,
            lease=lease,
            length=layout.nbytes,
            num_tokens=num_tokens,
            deadline_ns=deadline_ns,
            submitted_ns=time.monotonic_ns(),
            future=asyncio.get_running_loop().create_future(),
            adapter=adapter,
            stream=stream,
        )
        if self._quarantined:
            self._quarantined.check(lease.view[: layout.nbytes])
        link = self._choose(pending)
        failpoints.reach("frontend.before_commit")
        if link is None or not self._try_submit(link, pending):
            self._hold(pending)
        failpoints.reach("frontend.after_push")
        lease.hand_over(pending.request_id)
        return pending

    def _choose(self, pending: ShmPending) -> WorkerLink | None:
        """Return the worker for a new request, or None if the request must wait for a restarting worker."""
        candidates = self._candidates(pending)
        link = self._choose_among(candidates, pending)
        if link is None or self._may_take(link, pending):
            return link
        link = self._choose_among([other for other in candidates if self._may_take(other, pending)], pending)
        if link is None:
            is_queue = any(map(self._has_room, candidates))
            raise self._overloaded("the queue holds max_queued_tokens" if is_queue else "the ring is full")
        return link

    def _choose_among(self, links: Sequence[WorkerLink], pending: ShmPending) -> WorkerLink | None:
        if pending.stream is None:
            return choose_worker(links)
        entry = self._find_model(pending.model)
        return choose_for_stream(
            links,
            pending.model,
            most_together=self._streams_together,
            num_tokens=pending.num_tokens,
            max_tokens=max_gathered_tokens(entry.cache_tokens if entry is not None else 0),
        )

    def _try_submit(self, link: WorkerLink, pending: ShmPending) -> bool:
        """Submit a request to a worker; return False if that worker has gone. Raises Overloaded if its ring is full."""
        try:
            if link.try_submit(pending):
                return True
        except ConnectionError:  # only for a large payload: its memory is announced on the socket
            self._workers.set_aside(link)
            return False
        except ProtocolError as error:
            self._workers.report_fault(link, error)
            return False
        raise self._overloaded("the ring is full")

    def _candidates(self, pending: ShmPending) -> list[WorkerLink]:
        if pending.num_deaths >= _MAX_DEATHS:
            return []
        entry, links = self._find_model(pending.model), self._links
        workers = entry.workers if entry is not None and not pending.adapter else workers_with(entry, pending.adapter)
        return [links[slot] for slot in workers if slot in links]

    def _has_room(self, link: WorkerLink) -> bool:
        return len(link.pending) < self._max_per_link

    def _may_take(self, link: WorkerLink, pending: ShmPending) -> bool:
        """Return whether a worker's ring and queue have room for a request; an empty queue takes any one."""
        num_tokens = link.outstanding_tokens + pending.num_tokens
        is_in_bounds = num_tokens <= self._limits.max_queued_tokens or not link.outstanding_tokens
        return is_in_bounds and self._has_room(link)

    def _hold(self, pending: ShmPending) -> None:
        entry = self._find_model(pending.model)
        if entry is None or not (entry.recovering or entry.workers):
            raise Unavailable(f"Model '{pending.model}' is not loaded", code="MODEL_NOT_LOADED")
        if not is_coming(entry, pending.adapter):
            raise loading(pending.model, pending.adapter)
        held_tokens = self._held.num_tokens
        admission.check_queue(held_tokens, pending.num_tokens, self._limits.max_queued_tokens, self.tokens_per_s)
        self._held.add(pending)

    def _overloaded(self, reason: str) -> SieError:
        return admission.overloaded(reason, self.queued_tokens + self._held.num_tokens, self.tokens_per_s)

    # --- abandoning -----------------------------------------------------------------------------------------------

    def abandon(self, pending: Pending, error: SieError) -> None:
        """End the client's wait with an error and tell the worker not to run it; the lease stays with the worker."""
        assert isinstance(pending, ShmPending)
        if not pending.future.done():
            pending.future.set_exception(error)
        if self._held.remove(pending):
            pending.lease.end()
        elif pending.link is not None and pending.request_id in pending.link.pending:
            set_cancelled(pending.lease.view)

    def finish(self, pending: Pending) -> None:
        """Abandon a request whose remaining output is not needed."""
        if not pending.future.done():
            self.abandon(pending, ClientGone("nothing more is wanted"))

    def expire(self, now_ns: int) -> None:
        """Abandon overdue requests, release replies, and measure the rate of answers. The process's tick calls this."""
        for pending in self._all_pending():
            # If a caller is cancelled, only its future ends. A held request is at no worker that could end its lease.
            is_due = pending.link is None if pending.future.done() else pending.deadline_ns <= now_ns
            if is_due:
                self.abandon(pending, overdue(pending))
        links = list(self._links.values())
        for link, slowness in zip(links, measure_slowness([link.pace_ns for link in links]), strict=True):
            link.slowness = slowness
        for link in links:
            link.give_back()
            if link.is_late:
                self._hedge(link)
        self._replies.measure(now_ns, is_busy=self.queued_tokens > 0)

    def _all_pending(self) -> list[ShmPending]:
        pending = list(self._held)
        for link in self._workers:
            pending += link.pending.values()
        return pending

    # --- workers come and go --------------------------------------------------------------------------------------

    def attach(self, slot: int, attachment: Attachment) -> None:
        """Start to use a worker. Its replies are read whenever its bell rings."""
        self._workers.add(slot, attachment)
        self.place_held()

    def place_held(self) -> None:
        """Submit waiting requests to workers that now have their model; call when models or workers changed."""
        self._may_place = False
        for group in self._held.groups():
            for pending in group:
                if pending.future.done() or pending.num_deaths >= _MAX_DEATHS:
                    continue  # `expire` and `quarantine` end these
                candidates = self._candidates(pending)
                if not self._try_place(candidates, pending):
                    self._may_place |= bool(candidates)  # there will be room
                    break  # the others of the group have the same candidates

    def _try_place(self, candidates: list[WorkerLink], pending: ShmPending) -> bool:
        """Submit a waiting request to one of these workers. Return False if none has room."""
        link = choose_worker(filter(self._has_room, candidates))
        with contextlib.suppress(Overloaded):  # it keeps waiting
            if link is not None and self._try_submit(link, pending):
                self._held.remove(pending)
                return True
        return False

    def fail_held(self) -> None:
        """End the requests whose model will not come back. `quarantine` ends those with too many deaths."""
        for pending in [held for held in self._held if held.num_deaths < _MAX_DEATHS]:
            entry = self._find_model(pending.model)
            if entry is None or not (entry.recovering or entry.workers):
                self.abandon(pending, WorkerLost(f"Model '{pending.model}' was lost with its worker"))
            elif not is_coming(entry, pending.adapter):
                self.abandon(pending, loading(pending.model, pending.adapter))

    def set_late(self, slot: int, generation: int, running: tuple[int, ...], *, is_late: bool) -> None:
        """Record whether a worker is late. running: the requests of its late step."""
        self._workers.set_late(slot, generation, running, is_late=is_late)

    def _hedge(self, link: WorkerLink) -> None:
        """Copy requests of a late worker to others, as memory and queues allow. The rest waits for the next tick."""
        left_bytes = _MAX_HEDGED_BYTES
        for pending in [pending for pending in link.pending.values() if may_run_twice(pending)]:
            candidates = self._candidates(pending)
            other = choose_worker([other for other in candidates if self._may_take(other, pending)])
            if other is None or other.is_late:
                continue
            lease = self._space.lease(pending.length) if left_bytes > 0 else None
            if lease is None:
                return
            left_bytes -= pending.length
            with lease, contextlib.suppress(Overloaded):  # as in `place_held`
                copy = make_copy(pending, next(self._ids), lease, is_suspect=pending.request_id in link.late_step)
                if self._try_submit(other, copy):
                    lease.hand_over(copy.request_id)
                    pair(pending, copy)

    def fail_over(self, slot: int, generation: int, suspects: tuple[int, ...]) -> None:
        """Take back the requests of a worker that is dead, or has closed its end of the attachment. `place_held` gives them to other workers.

        suspects: its requests in the fatal step, if they may have caused the death. ORDER: its ring is drained a last
        time first, since an answered request must not run again.
        """
        link = self._workers.take_dead(slot, generation)
        if link is None:
            return
        try:
            self._replies.drain(link)
        except ProtocolError as error:
            _log.error("worker-%d died while it wrote: %s", slot, error)
        unwatch(link)
        link.is_alive = False
        orphans, link.pending = list(link.pending.values()), {}
        for pending in orphans:
            self._take_back(pending, pending.request_id in suspects)
        # Replies already handed out keep the mapping alive through their views; the rest goes now.
        link.attachment.close()

    def _take_back(self, pending: ShmPending, is_suspect: bool) -> None:
        """Hold a request of a dead worker until `place_held` finds another one, or end it if it must not run again."""
        if pending.future.done():
            pending.lease.end()
            return
        rival = unpair(pending)
        if rival is not None:  # another worker has it already
            pending.lease.end()
            if is_suspect:
                self._mark_suspect(rival)
            return
        if not pending.may_run_again():
            end(
                pending, WorkerLost("worker_lost: the worker died while it generated; the text sent so far stays valid")
            )
            return
        if is_suspect:
            self._mark_suspect(pending)
        self._requeue(pending)

    def _requeue(self, pending: ShmPending) -> None:
        pending.link = None
        self._held.add(pending)
        self._may_place = True

    def _mark_suspect(self, pending: ShmPending) -> None:
        """Count a worker's death against a request.

        After the first death any request of the step may be to blame, so each runs alone from then on. After the second
        death it is refused. Its client is told only when all frontends know: it might retry on another one at once.
        """
        pending.num_deaths += 1
        pending.flags |= FLAG_ALONE
        if pending.num_deaths >= _MAX_DEATHS:
            self._send(Quarantine(pending.digest()))

    def quarantine(self, digest: bytes) -> None:
        """Refuse an input from now on: it killed two workers, the second alone. The supervisor tells all frontends."""
        self._quarantined.add(digest)
        for pending in [held for held in self._held if held.num_deaths and held.digest() == digest]:
            self.abandon(pending, poison())

    def _on_bell(self, link: WorkerLink) -> None:
        try:
            self._replies.drain(link)
        except ProtocolError as error:
            self._workers.report_fault(link, error)
        if self._may_place:
            self.place_held()  # a dead worker's requests may have been more than the others' rings could take
