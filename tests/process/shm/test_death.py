"""SIGKILL of either side at each named point: nothing is lost, answered twice, answered wrongly or left behind."""

from __future__ import annotations

import signal
from collections import deque

import pytest

from sie.shm.layout import SUBMIT, Descriptor
from sie.shm.pool import Lease

_POINTS = ("before push", "mid-write", "before bell", "after push", "before credit", "after drain")
_NUM_REQUESTS = 40
_CAPACITY = 16


class Frontend:
    """Submits requests to one worker after another, from the same extents."""

    def __init__(self, space, peer) -> None:
        self.space = space
        self.peer = peer
        self.open: dict[int, tuple[Lease, int, bytes]] = {}
        self.unsent: deque[int] = deque()
        self.num_answered = 0
        for request_id in range(_NUM_REQUESTS):
            payload = request_id.to_bytes(4, "little") * (1 + 37 * request_id % 200)
            lease = space.lease(peer.PAYLOAD_AT + len(payload))
            self.open[request_id] = (lease, peer.write(lease, payload), payload)

    def attached(self, attachment) -> None:
        """Give a new worker everything that has no answer."""
        self.unsent = deque(self.open)
        self.submit(attachment)

    def submit(self, attachment) -> None:
        """Push what this worker has not got, as far as there is room."""
        while self.unsent:
            request_id = self.unsent[0]
            lease, length, _ = self.open[request_id]
            if not attachment.push(SUBMIT, 0, request_id, lease.address, length):
                return
            if lease.address not in self.space.pool.handed_over:
                lease.hand_over(request_id)
            self.unsent.popleft()

    def take(self, attachment, replies: list[Descriptor]) -> None:
        for reply in replies:
            lease, _, payload = self.open.pop(reply.request_id)
            assert self.peer.read(attachment.view(reply)) == payload[::-1]
            lease.end()
            self.num_answered += 1
        attachment.push_release([reply.offset for reply in replies])


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("point", _POINTS)
def test_worker_killed_at_a_named_point_costs_no_answer(peers, peer, new_fds, point: str, after: int) -> None:
    space = peer.create_space("frontend")
    frontend = Frontend(space, peer)
    attachment = peers.start("worker", space, 1, _CAPACITY, point, str(after))
    frontend.attached(attachment)
    while attachment.pidfd not in peers.wait_readable(attachment.bell_fd, attachment.pidfd):
        frontend.take(attachment, attachment.drain())
        frontend.submit(attachment)
    assert peers.wait() == -signal.SIGKILL
    frontend.take(attachment, attachment.drain())
    assert not attachment.read_socket()
    attachment.close()
    assert frontend.open, "the worker died too late to lose anything"

    successor = peers.start("worker", space, 2, _CAPACITY)
    frontend.attached(successor)
    while frontend.open:
        assert peers.wait_readable(successor.bell_fd, successor.pidfd) == {successor.bell_fd}
        frontend.take(successor, successor.drain())
        frontend.submit(successor)

    assert frontend.num_answered == _NUM_REQUESTS
    assert (space.num_leased, space.free_bytes) == (0, space.nbytes)
    successor.close()
    assert peers.wait() == 0
    space.close()
    assert not new_fds()


@pytest.mark.parametrize("point", _POINTS)
def test_frontend_killed_at_a_named_point_leaves_nothing_in_the_worker(peers, peer, new_fds, point: str) -> None:
    space = peer.create_space("worker")
    attachment = peers.start("frontend", space, 1, _CAPACITY, point, "5")
    waiting: list[Descriptor] = []
    while attachment.pidfd not in peers.wait_readable(attachment.bell_fd, attachment.pidfd):
        _serve(attachment, space, peer, waiting)
    assert peers.wait() == -signal.SIGKILL
    _serve(attachment, space, peer, waiting)

    assert not attachment.read_socket()
    for lease in list(space.pool.handed_over.values()):
        lease.end()
    assert (space.num_leased, space.free_bytes) == (0, space.nbytes)
    attachment.close()
    space.close()
    assert not new_fds()


def _serve(attachment, space, peer, waiting: list[Descriptor]) -> None:
    for descriptor in attachment.drain():
        if descriptor.kind == SUBMIT:
            waiting.append(descriptor)
        else:
            space.end_released(descriptor.offset)
    while waiting and peer.answer(attachment, space, waiting[0]):
        waiting.pop(0)


def test_stopped_worker_keeps_its_leases_until_it_is_dead(peers, peer) -> None:
    space = peer.create_space("frontend")
    frontend = Frontend(space, peer)
    attachment = peers.start("worker", space, 1, _CAPACITY)
    peers.kill()
    peers.wait_readable(attachment.pidfd)

    assert not attachment.read_socket()
    frontend.attached(attachment)  # into a ring that nobody reads: no error, and no answer
    assert len(frontend.unsent) == _NUM_REQUESTS - _CAPACITY
    attachment.close()
    assert space.num_leased == _NUM_REQUESTS
    space.close()
