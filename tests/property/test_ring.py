"""Both sides of an attachment against plain lists: order, nothing twice, nothing lost, leased + free == all.

A frontend and a worker live in one process here, so that every interleaving of their steps can be chosen. The worker
dies and comes back with a new generation; what it had not answered is submitted again from the same extents.
"""

from __future__ import annotations

import itertools
import os
import socket
import zlib
from collections import deque

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.extent import is_cancelled, set_cancelled
from sie.shm.large import LargeBudget
from sie.shm.layout import ERROR, RELEASE, REPLY, SUBMIT, Descriptor
from sie.shm.pool import Lease
from sie.shm.space import OutboundSpace
from sie.values.work_bytes import PROLOGUE_BYTES
from tests.property.lives import live, note

_CAPACITY = 4
_REQUEST_BYTES = 64 * 12
_REPLY_BYTES = 64 * 3
# 44 bytes fill an extent of one cache line to its end; 150 is most of a reply segment.
_payloads = st.builds(lambda first, size: bytes((first + k) % 256 for k in range(size)),
                      st.integers(0, 255), st.sampled_from([1, 44, 45, 150]))  # fmt: skip


def _write(lease: Lease, payload: bytes) -> int:
    """Fill an extent with no cancel, a checksum and the payload; return its length."""
    length = PROLOGUE_BYTES + 4 + len(payload)
    lease.view[:length] = bytes(PROLOGUE_BYTES) + zlib.crc32(payload).to_bytes(4, "little") + payload
    return length


def _read(view: memoryview) -> bytes:
    payload = bytes(view[PROLOGUE_BYTES + 4 :])
    assert zlib.crc32(payload).to_bytes(4, "little") == view[PROLOGUE_BYTES : PROLOGUE_BYTES + 4]
    return payload


class Request:
    """What the frontend remembers of a request that has no answer yet."""

    def __init__(self, lease: Lease, length: int, payload: bytes) -> None:
        self.lease = lease
        self.length = length
        self.payload = payload
        self.is_submitted = True
        self.is_cancelled = False
        self.is_answered = False  # the answer may still lie in the ring


def _has_worker(machine: RingMachine) -> bool:
    return machine.worker is not None


class RingMachine(RuleBasedStateMachine):
    @initialize(first_id=st.sampled_from([0, 2**64 - 40]), pushed_before=st.integers(0, _CAPACITY))
    def start(self, first_id: int, pushed_before: int) -> None:
        self.budget = LargeBudget(0)
        self.requests = OutboundSpace.create("f", _REQUEST_BYTES, self.budget)
        self.generation = 2**32 - 30  # near the wrap of its field, and never over it
        self.next_id = first_id
        self.open: dict[int, Request] = {}
        self.num_pushed = pushed_before
        self.worker: Attachment | None = None
        self.reattach()
        for _ in range(pushed_before):
            assert self.frontend.push(SUBMIT, 0, 0, 0, 64)
            assert self.live_worker().drain()

    def live_worker(self) -> Attachment:
        assert self.worker is not None
        return self.worker

    @precondition(lambda self: not _has_worker(self))
    @rule()
    def reattach(self) -> None:
        self.generation += 1
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.replies = OutboundSpace.create("w", _REPLY_BYTES, self.budget)
        own = [os.pidfd_open(os.getpid()) for _ in ends]
        pending = PendingAttachment(ends[0], own[0], self.generation, self.requests, _CAPACITY)
        self.worker = Attachment.connect(ends[1], own[1], self.generation, self.replies, _CAPACITY, timeout_s=60)
        attached = pending.try_finish()
        assert attached is not None
        self.frontend = attached
        self.to_worker: list[tuple[int, int]] = []  # (kind, request_id or address) in the ring, oldest first
        self.num_staged = 0  # the last of them, which the worker does not see yet
        self.to_frontend: list[tuple[int, int]] = []
        self.releases: list[int] = []  # waiting for credit
        self.queue: deque[Descriptor] = deque()  # drained by the worker, not answered
        for request in self.open.values():
            request.is_submitted = False
        self._submit_again()

    def _submit_again(self) -> None:
        for request_id, request in self.open.items():
            if not request.is_submitted:
                if not self._push_submit(request_id, request):
                    return
                request.is_submitted = True
                note("submitted again")

    def _push_submit(self, request_id: int, request: Request) -> bool:
        staged = self.frontend.stage(SUBMIT, 0, request_id, request.lease.address, request.length, num_tokens=3)
        self._releases_went_out()
        assert staged == (len(self.to_worker) < _CAPACITY)
        if staged:
            self.to_worker.append((SUBMIT, request_id))
            self.num_staged += 1
            self.num_pushed += 1
        else:
            note("ring full")
        return staged

    def _releases_went_out(self) -> None:
        while self.releases and len(self.to_worker) < _CAPACITY:
            self.to_worker.append((RELEASE, self.releases.pop(0)))
            self.num_staged = 0  # releases are published, and with them all before them
            self.num_pushed += 1
        if self.num_pushed > _CAPACITY:
            note("wrapped")

    @precondition(_has_worker)
    @rule(payloads=st.lists(_payloads, min_size=1, max_size=4), publishes=st.booleans())
    def push(self, payloads: list[bytes], publishes: bool) -> None:
        for payload in payloads:
            self._push_one(payload)
        if publishes:
            self._publish()

    def _publish(self) -> None:
        self.frontend.publish()
        self.num_staged = 0

    def _push_one(self, payload: bytes) -> None:
        lease = self.requests.lease(PROLOGUE_BYTES + 4 + len(payload))
        if lease is None:
            note("request segment full")
            return
        with lease:
            request = Request(lease, _write(lease, payload), payload)
            if self._push_submit(self.next_id, request):
                lease.hand_over(self.next_id)
                self.open[self.next_id] = request
                self.next_id = (self.next_id + 1) % 2**64

    @precondition(_has_worker)
    @rule(num_replies=st.integers(0, 4), together=st.booleans())
    def drain_and_reply(self, num_replies: int, together: bool) -> None:
        self._drain()
        if together:
            self._reply_together(num_replies)
        else:
            for _ in range(min(num_replies, len(self.queue))):
                self._reply_together(1)

    def _drain(self) -> None:
        drained = self.live_worker().drain()
        got = [(d.kind, d.offset if d.kind == RELEASE else d.request_id) for d in drained]
        num_seen = len(self.to_worker) - self.num_staged
        assert got == self.to_worker[:num_seen]
        if not got:
            note("empty")
        if self.num_staged:
            note("staged and not seen")
        del self.to_worker[:num_seen]
        for descriptor in drained:
            if descriptor.kind == RELEASE:
                self.replies.end_released(descriptor.offset)
            else:
                self.queue.append(descriptor)

    def _reply_together(self, num_replies: int) -> None:
        answers: list[tuple[tuple[int, int, int, int], Lease | None]] = []
        for descriptor in itertools.islice(self.queue, num_replies):
            answer = self._answer(descriptor)
            if answer is None:
                note("reply segment full")
                break
            answers.append(answer)
        room = _CAPACITY - len(self.to_frontend)
        num_staged = self.live_worker().stage_many([extent for extent, _ in answers])
        self.live_worker().publish()
        assert num_staged == min(len(answers), room)
        if num_staged > 1:
            note("answered several at once")
        for place, ((kind, request_id, _, _), lease) in enumerate(answers):
            if place < num_staged:
                self.to_frontend.append((kind, request_id))
                self.queue.popleft()
                self.open[request_id].is_answered = True
                if lease is not None:
                    lease.hand_over(request_id)
            elif lease is not None:
                lease.end()

    def _answer(self, descriptor: Descriptor) -> tuple[tuple[int, int, int, int], Lease | None] | None:
        """Return the extent that answers a request, and its lease; None without room."""
        view = self.live_worker().view(descriptor)
        request = self.open[descriptor.request_id]
        assert is_cancelled(view) == request.is_cancelled
        payload = _read(view)
        assert payload == request.payload
        if request.is_cancelled:
            return (ERROR, descriptor.request_id, 0, 0), None
        lease = self.replies.lease(PROLOGUE_BYTES + 4 + len(payload))
        if lease is None:
            return None
        return (REPLY, descriptor.request_id, lease.address, _write(lease, payload[::-1])), lease

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 1000))
    def cancel(self, pick: int) -> None:
        request = list(self.open.values())[pick % len(self.open)]
        set_cancelled(request.lease.view)
        request.is_cancelled = True
        note("cancel lost its race" if request.is_answered else "cancel in time")

    @precondition(_has_worker)
    @rule()
    def drain_replies(self) -> None:
        self._take_replies()
        self._submit_again()

    def _take_replies(self) -> None:
        drained = self.frontend.drain()
        self._releases_went_out()
        assert [(d.kind, d.request_id) for d in drained] == self.to_frontend
        self.to_frontend.clear()
        for descriptor in drained:
            request = self.open.pop(descriptor.request_id)
            if descriptor.kind == REPLY:
                assert _read(self.frontend.view(descriptor)) == request.payload[::-1]
            request.lease.end()
        done = [d.offset for d in drained if d.kind == REPLY]
        waiting = self.frontend.push_release(done)
        self.releases += done
        self._releases_went_out()
        assert waiting == len(self.releases)
        if waiting:
            note("release waited for credit")

    @precondition(_has_worker)
    @rule()
    def peer_dies(self) -> None:
        self.live_worker().close()
        self.replies.close()
        self.worker = None
        self.queue.clear()
        assert not self.frontend.read_socket()
        if self.to_frontend:
            note("died with answers in its ring")
        self._take_replies()
        self.frontend.close()
        for request in self.open.values():
            request.is_answered = False

    @invariant()
    def leased_and_free_are_the_whole_segment(self) -> None:
        if not hasattr(self, "requests"):
            return
        leased = sum(request.lease.nbytes for request in self.open.values())
        assert leased + self.requests.free_bytes == self.requests.nbytes
        assert self.requests.num_leased == len(self.open)
        if self.worker is not None:
            leased = sum(lease.nbytes for lease in self.replies.pool.handed_over.values())
            assert leased + self.replies.free_bytes == self.replies.nbytes

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        if self.worker is None:
            self.reattach()
        rounds = 0
        while self.open:
            rounds += 1
            assert rounds < 100, "a request never got its answer"
            self._publish()
            self.drain_and_reply(4, together=False)
            self.drain_replies()
        self.drain_and_reply(0, together=False)
        self.drain_replies()
        self._publish()
        self._drain()
        assert self.replies.num_leased == self.requests.num_leased == 0
        for part in (self.frontend, self.live_worker(), self.requests, self.replies):
            part.close()


def test_attachment_agrees_with_the_model() -> None:
    live(
        RingMachine, "ring full", "request segment full", "reply segment full", "empty", "wrapped", "cancel in time",
        "staged and not seen", "answered several at once", lives=200, steps=50,
    )  # fmt: skip
