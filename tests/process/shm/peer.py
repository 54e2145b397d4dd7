"""The other process of these tests: `python peer.py ROLE SOCKET_FD GENERATION CAPACITY [POINT AFTER]`.

ROLE worker answers each request with its payload reversed; ROLE frontend submits requests for ever and answers
nothing. Both leave at end of file. With a POINT it kills itself with SIGKILL there, at the AFTER-th time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import zlib
from collections import deque

from sie.shm import ring
from sie.shm.attach import Attachment
from sie.shm.extent import is_cancelled
from sie.shm.large import LargeBudget
from sie.shm.layout import ERROR, RELEASE, REPLY, SUBMIT, Descriptor, ProtocolError
from sie.shm.pool import Lease
from sie.shm.space import OutboundSpace
from sie.values.work_bytes import PROLOGUE_BYTES

SEGMENT_BYTES = 64 * 1024
LARGE_EXTENT_BYTES = 16 * 1024
MAX_LARGE_BYTES = 1 << 20
PAYLOAD_AT = PROLOGUE_BYTES + 4
POINTS = ("before push", "mid-write", "before bell", "after push", "before credit", "after drain")


def create_space(name: str) -> OutboundSpace:
    """Return memory small enough to be full often."""
    return OutboundSpace.create(
        name, SEGMENT_BYTES, LargeBudget(MAX_LARGE_BYTES), large_extent_bytes=LARGE_EXTENT_BYTES
    )


def write(lease: Lease, payload: bytes) -> int:
    """Fill an extent: not cancelled, checksum, payload; return its length."""
    length = PAYLOAD_AT + len(payload)
    lease.view[:PROLOGUE_BYTES] = bytes(PROLOGUE_BYTES)
    lease.view[PAYLOAD_AT:length] = payload
    _Fuse.reach("mid-write")
    lease.view[PROLOGUE_BYTES:PAYLOAD_AT] = zlib.crc32(payload).to_bytes(4, "little")
    return length


def read(view: memoryview) -> bytes:
    """Return an extent's payload, whose checksum must be right."""
    payload = bytes(view[PAYLOAD_AT:])
    assert zlib.crc32(payload).to_bytes(4, "little") == view[PROLOGUE_BYTES:PAYLOAD_AT], "wrong bytes"
    return payload


class _Fuse:
    """Kills this process at one named point."""

    point = ""
    times_left = 0

    @classmethod
    def reach(cls, point: str) -> None:
        if point == cls.point:
            cls.times_left -= 1
            if cls.times_left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    @classmethod
    def arm(cls, point: str, after: int) -> None:
        """Put the fuse around every doorbell of this process's rings."""
        assert point in POINTS
        cls.point, cls.times_left = point, after
        plain = ring.eventfd_write

        def eventfd_write(fd: int, count: int) -> None:
            is_bell = fd in _bells
            cls.reach("before bell" if is_bell else "before credit")
            plain(fd, count)
            cls.reach("after push" if is_bell else "after drain")

        ring.eventfd_write = eventfd_write


_bells: set[int] = set()


def _attach(sock_fd: int, generation: int, capacity: int) -> tuple[Attachment, OutboundSpace]:
    space = create_space("peer")
    sock = socket.socket(fileno=sock_fd)
    attachment = Attachment.connect(sock, os.pidfd_open(os.getppid()), generation, space, capacity, timeout_s=120)
    _bells.add(attachment._producer.fds[1])
    return attachment, space


def run_worker(attachment: Attachment, space: OutboundSpace) -> None:
    """Answer every request; what finds no credit or extent waits for the next release."""
    waiting: deque[Descriptor] = deque()
    poll = select.poll()
    for fd in (attachment.bell_fd, attachment.sock_fd, attachment.pidfd):
        poll.register(fd, select.POLLIN)
    while True:
        ready = dict(poll.poll(120_000))
        assert ready, "nothing happened for 120 s"
        if attachment.pidfd in ready or not attachment.read_socket():
            return
        for descriptor in attachment.drain():
            if descriptor.kind == RELEASE:
                space.end_released(descriptor.offset)
            else:
                waiting.append(descriptor)
        while waiting and answer(attachment, space, waiting[0]):
            waiting.popleft()


def answer(attachment: Attachment, space: OutboundSpace, request: Descriptor) -> bool:
    """Send one answer; False while there is no extent or no credit for it."""
    view = attachment.view(request)
    if is_cancelled(view):
        return attachment.push(ERROR, 0, request.request_id, 0, 0)
    payload = read(view)[::-1]
    lease = space.lease(PAYLOAD_AT + len(payload))
    if lease is None:
        return False
    with lease:
        length = write(lease, payload)
        _Fuse.reach("before push")
        if not attachment.push(REPLY, 0, request.request_id, lease.address, length):
            return False
        lease.hand_over(request.request_id)
    return True


def run_frontend(attachment: Attachment, space: OutboundSpace) -> None:
    """Submit until the extents are used up, release every reply, and go on."""
    request_id = 0
    leases: dict[int, Lease] = {}
    poll = select.poll()
    for fd in (attachment.bell_fd, attachment.sock_fd, attachment.pidfd):
        poll.register(fd, select.POLLIN)
    while True:
        while (lease := space.lease(1000)) is not None:
            with lease:
                length = write(lease, request_id.to_bytes(8, "little") * 100)
                _Fuse.reach("before push")
                if not attachment.push(SUBMIT, 0, request_id, lease.address, length):
                    break
                lease.hand_over(request_id)
            leases[request_id] = lease
            request_id += 1
        ready = dict(poll.poll(120_000))
        assert ready, "nothing happened for 120 s"
        if attachment.pidfd in ready or not attachment.read_socket():
            return
        for reply in attachment.drain():
            leases.pop(reply.request_id).end()
            attachment.push_release([reply.offset])


def main() -> int:
    role, sock_fd, generation, capacity, *fuse = sys.argv[1:]
    if fuse:
        _Fuse.arm(fuse[0], int(fuse[1]))
    attachment, space = _attach(int(sock_fd), int(generation), int(capacity))
    try:
        (run_worker if role == "worker" else run_frontend)(attachment, space)
    except (ProtocolError, AssertionError) as error:
        print(f"peer: {error}", file=sys.stderr)
        return 1
    attachment.close()
    space.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
