from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import astuple, replace

from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.attach_messages import Announce, Message, Offer, Retire, send
from sie.shm.large import LargeBudget
from sie.shm.layout import LAYOUT_VERSION, RELEASE, REPLY, SUBMIT, Descriptor, ProtocolError
from sie.shm.segment import ReservationError, Segment
from sie.shm.space import OutboundSpace


def _submit(pair, payload: bytes, request_id: int = 1):
    lease = pair.requests.lease(len(payload))
    assert lease is not None
    lease.view[: len(payload)] = payload
    assert pair.frontend.push(SUBMIT, 0, request_id, lease.address, lease.nbytes)
    lease.hand_over(request_id)
    return lease


def _raw(**fields: int) -> Descriptor:
    values = {"kind": SUBMIT, "flags": 0, "generation": 7, "request_id": 1, "offset": 0, "length": 64,
              "deadline_ns": 0, "num_tokens": 0, "part": 0, "parts": 1}  # fmt: skip
    return Descriptor(**(values | fields))


def test_request_and_reply_cross_and_their_extents_come_back(pair) -> None:
    request = _submit(pair, b"question", request_id=5)
    (descriptor,) = pair.worker.drain()
    assert bytes(pair.worker.view(descriptor)[:8]) == b"question"
    assert pair.worker.view(descriptor).readonly

    reply = pair.replies.lease(6)
    reply.view[:6] = b"answer"
    assert pair.worker.push(REPLY, 0, descriptor.request_id, reply.address, 64)
    reply.hand_over(descriptor.request_id)
    (answer,) = pair.frontend.drain()
    assert (answer.request_id, bytes(pair.frontend.view(answer)[:6])) == (5, b"answer")

    request.end()
    assert pair.frontend.push_release([answer.offset]) == 0
    (released,) = pair.worker.drain()
    assert released.kind == RELEASE
    assert pair.replies.end_released(released.offset) is reply
    assert pair.requests.num_leased == pair.replies.num_leased == 0


def test_full_ring_refuses_work_and_takes_it_again_after_a_drain(pair) -> None:
    for _ in range(8):
        assert pair.frontend.push(SUBMIT, 0, 1, 0, 64)

    assert not pair.frontend.push(SUBMIT, 0, 1, 0, 64)
    assert len(pair.worker.drain()) == 8
    assert pair.frontend.push(SUBMIT, 0, 1, 0, 64)


def test_extents_are_staged_together_as_far_as_there_is_credit(pair) -> None:
    extents = [(REPLY, number, 64 * number, 64) for number in range(1, 11)]
    assert pair.worker.stage_many(extents) == 8
    assert pair.frontend.drain() == [], "not before they are published"
    pair.worker.publish()
    assert [(d.kind, d.request_id, d.offset, d.length) for d in pair.frontend.drain()] == extents[:8]

    assert _is_readable(pair.worker.bell_fd), "credit came back, for which the others wait"
    pair.worker.drain()
    assert pair.worker.stage_many(extents[8:]) == 2


def test_releases_go_before_extents_that_are_staged_together(pair) -> None:
    for _ in range(8):
        assert pair.worker.push(REPLY, 0, 1, 0, 64)
    assert pair.worker.push_release([64, 128]) == 2
    assert pair.worker.stage_many([(REPLY, 2, 0, 64)]) == 0
    pair.frontend.drain()
    assert pair.worker.stage_many([(REPLY, 2, 0, 64), (REPLY, 3, 0, 64)]) == 2
    pair.worker.publish()

    assert [(d.kind, d.request_id) for d in pair.frontend.drain()] == [
        (RELEASE, 0),
        (RELEASE, 0),
        (REPLY, 2),
        (REPLY, 3),
    ]


def test_large_extent_among_those_that_are_staged_together_is_announced(pair) -> None:
    small, large = pair.replies.lease(64), pair.replies.lease(5000)
    large.view[:5000] = b"x" * 5000
    assert pair.worker.stage_many([(REPLY, 1, small.address, 64), (REPLY, 2, large.address, 5000)]) == 2
    pair.worker.publish()
    _, reply = pair.frontend.drain()

    assert bytes(pair.frontend.view(reply)) == b"x" * 5000


def test_releases_wait_for_credit_ahead_of_later_work(pair) -> None:
    for _ in range(7):
        assert pair.frontend.push(SUBMIT, 0, 1, 0, 64)

    assert pair.frontend.push_release([64, 128, 192]) == 2
    assert not pair.frontend.push(SUBMIT, 0, 2, 0, 64)
    assert [d.offset for d in pair.worker.drain() if d.kind == RELEASE] == [64]
    assert pair.frontend.push(SUBMIT, 0, 2, 0, 64)
    assert [(d.kind, d.offset) for d in pair.worker.drain()] == [(RELEASE, 128), (RELEASE, 192), (SUBMIT, 0)]


def test_waiting_releases_are_published_by_a_drain(pair) -> None:
    assert pair.frontend.push_release([64] * 9) == 1
    pair.worker.drain()
    assert pair.frontend.drain() == []

    assert len(pair.worker.drain()) == 1


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@pytest.mark.parametrize("waiting", ["work", "release"])
def test_bell_wakes_a_side_whose_push_found_the_ring_full(pair, waiting: str) -> None:
    for _ in range(8):
        assert pair.frontend.push(SUBMIT, 0, 1, 0, 64)
    if waiting == "work":
        assert not pair.frontend.push(SUBMIT, 0, 1, 0, 64)
    else:
        assert pair.frontend.push_release([64]) == 1
    assert not _is_readable(pair.frontend.bell_fd)
    pair.worker.drain()
    assert _is_readable(pair.frontend.bell_fd)
    assert pair.frontend.drain() == []

    assert not _is_readable(pair.frontend.bell_fd)
    assert len(pair.worker.drain()) == (waiting == "release")


def test_side_that_waits_for_credit_is_woken_after_a_drain_that_brought_none(pair) -> None:
    while pair.frontend.push(SUBMIT, 0, 1, 0, 64):
        pass
    assert pair.frontend.drain() == []
    pair.worker.drain()

    assert _is_readable(pair.frontend.bell_fd)


def test_credit_without_a_waiting_side_wakes_nobody(pair) -> None:
    assert pair.frontend.push(SUBMIT, 0, 1, 0, 64)
    assert _is_readable(pair.worker.bell_fd)
    pair.worker.drain()

    assert not _is_readable(pair.worker.bell_fd)
    assert not _is_readable(pair.frontend.bell_fd)


def test_descriptors_of_another_generation_are_dropped(pair) -> None:
    for generation in (6, 7, 8):
        pair.frontend._producer.push(*astuple(_raw(generation=generation, request_id=generation)))

    assert [d.request_id for d in pair.worker.drain()] == [7]


@pytest.mark.parametrize("kind", [0, 6, 65535])
def test_unknown_kind_is_a_protocol_error(pair, kind: int) -> None:
    pair.frontend._producer.push(*astuple(_raw(kind=kind)))

    with pytest.raises(ProtocolError, match="kind"):
        pair.worker.drain()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 4097), (4096, 64), (32, 64), (0, 0), (0, 15), (2**48 - 64, 64), (0, 2**64 - 1), (4032, 2**64 - 4032)],
)
def test_extent_outside_the_peers_segment_is_a_protocol_error(pair, offset: int, length: int) -> None:
    with pytest.raises(ProtocolError, match="bytes at"):
        pair.worker.view(_raw(offset=offset, length=length))


def test_large_payload_crosses_in_its_own_segment_announced_once(pair) -> None:
    lease = _submit(pair, b"x" * 5000)
    assert pair.frontend.push(SUBMIT, 0, 2, lease.address, 5000)
    first, second = pair.worker.drain()

    assert bytes(pair.worker.view(first)[:5000]) == b"x" * 5000
    assert bytes(pair.worker.view(second)) == b"x" * 5000
    assert pair.worker.view(first).readonly
    with pytest.raises(ProtocolError, match="bytes at"):
        pair.worker.view(replace(first, length=8193))


def test_large_reply_is_released_like_any_other(pair) -> None:
    lease = pair.replies.lease(5000)
    assert pair.worker.push(REPLY, 0, 1, lease.address, 5000)
    lease.hand_over(1)
    (reply,) = pair.frontend.drain()
    pair.frontend.view(reply)
    pair.frontend.push_release([reply.offset])
    (released,) = pair.worker.drain()
    pair.replies.end_released(released.offset)

    assert pair.replies.num_leased == 0


def test_retired_large_segment_is_unmapped_by_the_peer(pair, num_fds: Callable[[], int]) -> None:
    before = num_fds()
    lease = _submit(pair, b"x" * 5000)
    (descriptor,) = pair.worker.drain()
    pair.worker.view(descriptor)
    lease.end()
    assert pair.requests.large.retire_oldest()
    assert pair.worker.read_socket()

    assert num_fds() == before
    with pytest.raises(ProtocolError, match="not announced"):
        pair.worker.view(descriptor)


def test_large_segment_that_was_not_announced_is_a_protocol_error(pair) -> None:
    with pytest.raises(ProtocolError, match="not announced"):
        pair.worker.view(_raw(offset=3 << 48))


def test_request_can_be_given_to_a_second_worker_from_the_same_bytes(pair) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    replies = OutboundSpace.create("w2", 4096, LargeBudget(0))
    pending = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), 8, pair.requests, 8)
    worker = Attachment.connect(ends[1], os.pidfd_open(os.getpid()), 8, replies, 8, timeout_s=60)
    frontend = pending.try_finish()
    for size in (10, 5000):
        lease = _submit(pair, b"z" * size)
        assert frontend is not None
        assert frontend.push(SUBMIT, 0, 1, lease.address, lease.nbytes)
        (descriptor,) = worker.drain()
        assert bytes(worker.view(descriptor)[:size]) == b"z" * size
    for part in (frontend, worker, replies):
        part.close()


def test_closed_peer_is_end_of_file_while_its_descriptors_can_still_be_read(pair) -> None:
    _submit(pair, b"last words")
    pair.frontend.close()

    assert not pair.worker.read_socket()
    (descriptor,) = pair.worker.drain()
    assert bytes(pair.worker.view(descriptor)[:10]) == b"last words"


def test_last_large_reply_of_a_peer_that_left_messages_unread_can_be_read(pair) -> None:
    for lease in (_submit(pair, b"x" * 5000), pair.replies.lease(5000)):
        lease.view[:5] = b"reply"
    assert pair.worker.push(REPLY, 0, 1, lease.address, 5000)
    pair.worker.close()
    (descriptor,) = pair.frontend.drain()

    assert bytes(pair.frontend.view(descriptor)[:5]) == b"reply"
    assert not pair.frontend.read_socket()


def test_large_payload_for_a_peer_that_has_gone_is_a_connection_error(pair) -> None:
    pair.worker.close()
    lease = pair.requests.lease(5000)

    with pytest.raises(ConnectionError):
        pair.frontend.push(SUBMIT, 0, 1, lease.address, 5000)


def test_closed_attachment_leaves_no_descriptor_open(pair, num_fds: Callable[[], int]) -> None:
    pair.frontend.close()
    pair.frontend.close()
    pair.worker.close()
    pair.requests.close()
    pair.replies.close()
    open_after_close = num_fds()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests, replies = (OutboundSpace.create(name, 4096, LargeBudget(0)) for name in "ab")
    pending = PendingAttachment(ends[0], os.pidfd_open(os.getpid()), 1, requests, 8)
    worker = Attachment.connect(ends[1], os.pidfd_open(os.getpid()), 1, replies, 8, timeout_s=60)
    frontend = pending.try_finish()
    assert frontend is not None
    for part in (frontend, worker, requests, replies):
        part.close()

    assert num_fds() == open_after_close


@pytest.mark.parametrize("num_left", range(9))
def test_attachment_without_descriptors_leaves_none_open(num_left: int, num_fds: Callable[[], int]) -> None:
    requests, replies = (OutboundSpace.create(name, 4096, LargeBudget(0)) for name in "ab")
    before = num_fds()
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfds = [os.pidfd_open(os.getpid()) for _ in ends]
    peer = PendingAttachment(ends[1], pidfds[1], 1, replies, 8)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free_fd() + num_left, hard))
    try:
        with pytest.raises((OSError, ProtocolError, ReservationError)):
            Attachment.connect(ends[0], pidfds[0], 1, requests, 8, timeout_s=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    peer.close()
    assert num_fds() == before
    requests.close()
    replies.close()


def first_free_fd() -> int:
    """Return the number that the next descriptor gets."""
    fd = os.dup(0)
    os.close(fd)
    return fd


class Stranger:
    """A peer that says whatever a test wants."""

    def __init__(self) -> None:
        self.sock, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.space = OutboundSpace.create("t", 4096, LargeBudget(0))
        self.segment = Segment.create("stranger", 4096)
        self.ring = Segment.create("ring", 512)
        self.bells = [os.eventfd(0), os.eventfd(0)]

    @property
    def fds(self) -> list[int]:
        return [self.segment.fd, self.ring.fd, *self.bells]

    def say(self, message: Message | bytes, fds: list[int]) -> None:
        if isinstance(message, bytes):
            socket.send_fds(self.sock, [message], fds)
        else:
            send(self.sock, message, fds)

    def connect(self, timeout_s: float = 60.0) -> Attachment:
        return Attachment.connect(self._other, os.pidfd_open(os.getpid()), 7, self.space, 8, timeout_s=timeout_s)

    def close(self) -> None:
        self.sock.close()
        self._other.close()
        for segment in (self.space, self.segment, self.ring):
            segment.close()
        for bell in self.bells:
            os.close(bell)


@pytest.fixture
def stranger(num_fds: Callable[[], int]) -> Iterator[Stranger]:
    before = num_fds()
    made = Stranger()
    yield made
    made.close()
    assert num_fds() == before


def test_peer_that_says_nothing_is_a_timeout(stranger: Stranger) -> None:
    with pytest.raises(TimeoutError, match="no offer"):
        stranger.connect(timeout_s=0.02)


def test_peer_that_closes_before_its_offer_is_a_connection_error(stranger: Stranger) -> None:
    stranger.sock.close()
    with pytest.raises(ConnectionError):
        stranger.connect()


_GOOD = Offer(LAYOUT_VERSION, 7, 4096, 8)


@pytest.mark.parametrize(
    "message",
    [
        Offer(LAYOUT_VERSION + 1, 7, 4096, 8),
        Offer(LAYOUT_VERSION, 6, 4096, 8),
        Offer(LAYOUT_VERSION, 7, 8192, 8),
        Offer(LAYOUT_VERSION, 7, -1, 8),
        Offer(LAYOUT_VERSION, 7, 4096, 16),
        Offer(LAYOUT_VERSION, 7, 4096, 7),
        Offer(LAYOUT_VERSION, 7, 4096, 2**60),
    ],
)
def test_offer_that_does_not_fit_is_a_protocol_error(stranger: Stranger, message: Message) -> None:
    stranger.say(message, stranger.fds)
    with pytest.raises(ProtocolError):
        stranger.connect()


@pytest.mark.parametrize(("message", "num_fds_sent"), [
    (_GOOD, 3), (_GOOD, 5), (_GOOD, 0), (b"\xc1", 4), (b"x" * 3000, 1), (Announce(1, 4096), 1), (Retire(1), 0),
])  # fmt: skip
def test_message_that_is_no_offer_is_a_protocol_error(
    stranger: Stranger, message: Message | bytes, num_fds_sent: int
) -> None:
    stranger.say(message, (stranger.fds * 2)[:num_fds_sent])
    with pytest.raises(ProtocolError):
        stranger.connect()


@pytest.mark.parametrize(("message", "num_fds_sent"), [
    (_GOOD, 4), (Announce(0, 4096), 1), (Announce(65536, 4096), 1), (Announce(1, 8192), 1), (Announce(1, 4096), 2),
    (Retire(1), 0), (Retire(1), 1), (b"", 1),
])  # fmt: skip
def test_wrong_message_after_the_offer_is_refused(
    stranger: Stranger, message: Message | bytes, num_fds_sent: int
) -> None:
    stranger.say(_GOOD, stranger.fds)
    attachment = stranger.connect()
    stranger.say(message, stranger.fds[:num_fds_sent])

    with contextlib.suppress(ProtocolError):
        assert not attachment.read_socket()
    attachment.close()


def test_segment_announced_twice_is_a_protocol_error(stranger: Stranger) -> None:
    stranger.say(_GOOD, stranger.fds)
    attachment = stranger.connect()
    stranger.say(Announce(1, 4096), stranger.fds[:1])
    assert attachment.read_socket()
    stranger.say(Announce(1, 4096), stranger.fds[:1])

    with pytest.raises(ProtocolError, match="announced beside"):
        attachment.read_socket()
    attachment.close()
