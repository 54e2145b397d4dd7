"""Connects one frontend-worker pair: both rings, the peer's memory, and the socket that exchanged them.

Both sides do the same on a new SOCK_SEQPACKET pair from the supervisor. A worker waits for the frontend's offer first:

    Offer + fds (segment, ring, bell, credit)   -->    <--   Offer + fds
    Announce(number, nbytes) + fd of a large segment         before the first descriptor that uses it
    Retire(number)                                           the segment is gone; the number may be used again

End of file on the socket ends the use of the peer (it closed, or died). Only a readable pidfd proves that the peer no
longer reads its extents, so only then they may be reclaimed. After `connect` nothing here ever waits.

Releases are never lost. Each is one descriptor in the ring that also carries work. If the ring is full, the release
waits in a list here, before all later work. The list is bounded by the peer's extents that this side holds. It empties
because the peer always drains its ring, even while it waits for something else.

Callers watch one descriptor for the rings, `bell_fd`: an epoll on the bell, and on the credit while something waits for
credit. Without the second part two peers could sleep for ever: one without an extent for its reply, the other with
releases that found the ring full.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterable, Sequence
from itertools import takewhile

from sie.shm.attach_messages import Announce, Message, Offer, Retire, close_all, receive, send
from sie.shm.layout import LAST_KIND, LAYOUT_VERSION, OFFSET_MASK, RELEASE, SEGMENT_SHIFT, Descriptor, ProtocolError
from sie.shm.ring import RingConsumer, RingProducer
from sie.shm.segment import Segment
from sie.shm.space import InboundSpace, OutboundSpace
from sie.values.work_bytes import PROLOGUE_BYTES


class PendingAttachment:
    """An attachment that has sent its offer and waits for the peer's offer.

    For event loops: wait until `sock_fd` is readable, then call `try_finish`. Other callers use `Attachment.connect`.
    """

    __slots__ = ("_generation", "_outbound", "_pidfd", "_producer", "_sock", "sock_fd")

    def __init__(
        self, sock: socket.socket, peer_pidfd: int, generation: int, outbound: OutboundSpace, ring_capacity: int
    ) -> None:
        """Create our ring and send our offer. Takes over sock (SOCK_SEQPACKET) and peer_pidfd, but not if it raises.

        Raises ConnectionError when the peer has gone, ReservationError when the ring's memory is not available, and OSError
        without a free descriptor. After the last two the caller can try again.
        """
        self._sock = sock
        self._pidfd = peer_pidfd
        self._generation = generation
        self._outbound = outbound
        self.sock_fd = sock.fileno()
        sock.setblocking(False)
        self._producer = RingProducer.create(ring_capacity)
        try:
            offer = Offer(LAYOUT_VERSION, generation, outbound.nbytes, ring_capacity)
            if not send(sock, offer, [outbound.fd, *self._producer.fds]):
                raise ConnectionError("the attachment's socket is in use already")
        except BaseException:
            self._producer.close()
            raise

    def try_finish(self) -> Attachment | None:
        """Return the attachment, or None while the peer's offer has not arrived.

        Raises ProtocolError on an offer that does not fit ours, ConnectionError at end of file, OSError without a free
        descriptor. Then the caller stops watching this, and closes it.
        """
        received = receive(self._sock)
        if received is None:
            return None
        peer, consumer = _accept_offer(*received, self._generation)
        try:
            attachment = Attachment(
                sock=self._sock,
                pidfd=self._pidfd,
                generation=self._generation,
                outbound=self._outbound,
                producer=self._producer,
                consumer=consumer,
                peer=peer,
            )
        except BaseException:
            consumer.close()
            peer.close()
            raise
        self._pidfd = -1
        return attachment

    def close(self) -> None:
        """Give up the attachment; does nothing after it is finished or closed."""
        if self._pidfd < 0:
            return
        self._producer.close()
        self._sock.close()
        os.close(self._pidfd)
        self._pidfd = -1


class Attachment:
    """Both directions of one frontend-worker pair, one generation."""

    __slots__ = ("_announced", "_consumer", "_credit_fd", "_epoll", "_inbound", "_outbound", "_peer_bytes",
                 "_peer_view", "_producer", "_releases", "_retired", "_sock", "_stage", "_waits_for_credit", "bell_fd",
                 "generation", "pidfd", "publish", "sock_fd")  # fmt: skip

    def __init__(
        self,
        *,
        sock: socket.socket,
        pidfd: int,
        generation: int,
        outbound: OutboundSpace,
        producer: RingProducer,
        consumer: RingConsumer,
        peer: Segment,
    ) -> None:
        """Take over all arguments except outbound, but not if it raises. Callers use `connect` or `PendingAttachment` instead.

        Raises OSError without a free descriptor.
        """
        self._epoll = select.epoll()
        self._sock = sock
        self._outbound = outbound
        self._producer = producer
        self._stage = producer.stage
        self.publish = producer.publish
        """Publish the staged descriptors to the peer; raises ProtocolError on a broken doorbell."""
        self._consumer = consumer
        self._inbound = InboundSpace(peer)
        self._peer_view = peer.view
        self._peer_bytes = peer.nbytes
        self._announced: set[int] = set()  # numbers of our large segments that the peer has
        self._retired: list[int] = []  # numbers that the peer must be told are gone
        self._releases: list[tuple[int, int, int, int]] = []  # extents whose releases wait for credit
        self.generation = generation
        self._credit_fd = producer.fds[2]
        self._waits_for_credit = False
        self._epoll.register(consumer.bell_fd, select.EPOLLIN)
        self._epoll.register(self._credit_fd, 0)
        self.bell_fd = self._epoll.fileno()
        """Readable: call `drain`, then retry each `push` that found the ring full."""
        self.sock_fd = sock.fileno()
        """Readable: call `read_socket`."""
        self.pidfd = pidfd
        """Readable: the peer is dead."""
        outbound.retire_listeners.append(self._retire)

    @classmethod
    def connect(
        cls,
        sock: socket.socket,
        peer_pidfd: int,
        generation: int,
        outbound: OutboundSpace,
        ring_capacity: int,
        *,
        timeout_s: float,
    ) -> Attachment:
        """Exchange offers with the peer and return the attachment. Takes over sock and peer_pidfd in every case.

        Waits at most timeout_s, then raises TimeoutError. Raises the errors of `PendingAttachment`.
        """
        deadline = time.monotonic() + timeout_s
        try:
            pending = PendingAttachment(sock, peer_pidfd, generation, outbound, ring_capacity)
        except BaseException:
            sock.close()
            os.close(peer_pidfd)
            raise
        poll = select.poll()
        poll.register(pending.sock_fd, select.POLLIN)
        poll.register(peer_pidfd, select.POLLIN)
        try:
            while (attachment := pending.try_finish()) is None:
                left_s = deadline - time.monotonic()
                ready = poll.poll(max(0.0, left_s) * 1000)
                if not ready and left_s <= 0:
                    raise TimeoutError(f"no offer from the peer within {timeout_s} s")
                if [fd for fd, _ in ready] == [peer_pidfd]:
                    raise ConnectionError("the peer died before its offer")
        except BaseException:
            pending.close()
            raise
        return attachment

    def stage(  # noqa: PLR0917  # a descriptor's fields in its order; keywords cost 0.1 us here
        self,
        kind: int,
        flags: int,
        request_id: int,
        address: int,
        length: int,
        deadline_ns: int = 0,
        num_tokens: int = 0,
        part: int = 0,
        parts: int = 1,
    ) -> bool:
        """Write the descriptor of the extent at address, for `publish`; the address is from a lease of `outbound`.

        Call `hand_over` on the lease afterwards. Returns False, without effect, when the ring (or the socket, for a
        large segment) is full. Never waits. Raises ProtocolError, and ConnectionError when a large segment is announced
        to a peer that has gone.
        """
        if (self._releases or address > OFFSET_MASK) and not self._prepare(address):
            return False
        staged = self._stage(
            kind, flags, self.generation, request_id, address, length, deadline_ns, num_tokens, part, parts
        )
        if not staged:
            self._wait_for_credit(waits=True)
        return staged

    def stage_many(self, extents: Sequence[tuple[int, int, int, int]]) -> int:
        """Stage (kind, request_id, address, length) of extents in order, as `stage` does; return how many fitted."""
        if self._releases or self._outbound.large.num_leased:
            staged = (self.stage(kind, 0, request_id, address, length) for kind, request_id, address, length in extents)
            return sum(1 for _ in takewhile(bool, staged))
        num_staged = self._producer.stage_extents(self.generation, extents)
        if num_staged < len(extents):
            self._wait_for_credit(waits=True)
        return num_staged

    def push(self, *fields: int, **named: int) -> bool:
        """Stage one extent as `stage` does, and publish all staged descriptors."""
        staged = self.stage(*fields, **named)
        self.publish()
        return staged

    def push_release(self, addresses: Iterable[int]) -> int:
        """Tell the peer that its extents at addresses are no longer needed; return how many releases still wait.

        A later `push`, `push_release` or `drain` publishes the rest; no release is ever lost.
        """
        self._releases += [(RELEASE, 0, address, 0) for address in addresses]
        return self._flush_releases()

    def drain(self) -> list[Descriptor]:
        """Copy out all descriptors of this generation that the peer published, oldest first. Never waits.

        Raises ProtocolError on a broken doorbell or an unknown kind; then end the attachment.
        """
        descriptors = self._consumer.drain()
        generation = self.generation
        for descriptor in descriptors:
            if descriptor.generation != generation or not 0 < descriptor.kind <= LAST_KIND:
                descriptors = self._checked(descriptors)
                break
        if self._waits_for_credit:
            still_full = self._flush_releases() or not self._producer.num_credits
            self._wait_for_credit(waits=bool(still_full))
        return descriptors

    def view(self, descriptor: Descriptor) -> memoryview:
        """Return the peer's extent, read-only, exactly `length` bytes, valid until it is released.

        Raises ProtocolError when the descriptor does not name an aligned extent with a prologue inside a segment.
        """
        offset, length = descriptor.offset, descriptor.length
        end = offset + length
        if offset & 63 or length < PROLOGUE_BYTES or end > self._peer_bytes:
            return self._other_view(offset, length)
        return self._peer_view[offset:end]

    def read_socket(self) -> bool:
        """Read the messages on the socket; False at end of file: stop using the peer. Never waits.

        Raises ProtocolError on a message that the protocol does not allow here; then end the attachment.
        """
        if self._retired:
            self._tell_retired()
        while True:
            try:
                received = receive(self._sock)
                if received is None:
                    return True
                self._apply(*received)
            except ConnectionResetError:
                # The peer closed with unread messages of ours. The error comes once, before the peer's last messages.
                continue
            except ConnectionError:
                return False

    def close(self) -> None:
        """Unmap the peer's memory and close everything except outbound; a second call does nothing."""
        if self.pidfd < 0:
            return
        self._outbound.retire_listeners.remove(self._retire)
        self._epoll.close()
        self._producer.close()
        self._consumer.close()
        self._peer_view = memoryview(b"")
        self._peer_bytes = 0
        self._inbound.close()
        self._sock.close()
        os.close(self.pidfd)
        self.bell_fd = self.sock_fd = self.pidfd = -1

    def _flush_releases(self) -> int:
        """Publish the releases that wait for credit; return how many still do."""
        releases = self._releases
        if releases:
            num_staged = self._producer.stage_extents(self.generation, releases)
            del releases[:num_staged]
            if num_staged:
                self._producer.publish()
            if releases:
                self._wait_for_credit(waits=True)
        return len(releases)

    def _wait_for_credit(self, *, waits: bool) -> None:
        """Make `bell_fd` readable when credit arrives, only while something waits for credit."""
        if waits != self._waits_for_credit:
            self._waits_for_credit = waits
            self._epoll.modify(self._credit_fd, select.EPOLLIN if waits else 0)

    def _prepare(self, address: int) -> bool:
        """Publish releases and announce the segment before this address's descriptor; False if not possible now."""
        if self._flush_releases():
            return False
        number = address >> SEGMENT_SHIFT
        return not number or number in self._announced or self._announce(number)

    def _announce(self, number: int) -> bool:
        """Send a large segment's fd; False when the socket is full."""
        if not self._tell_retired():
            return False
        segment = self._outbound.large.segment(number)
        # ORDER: before the descriptor that uses the number; the peer reads the socket when it finds this descriptor.
        sent = send(self._sock, Announce(number, segment.nbytes), [segment.fd])
        if sent:
            self._announced.add(number)
        return sent

    def _retire(self, number: int) -> None:
        """Record that our large segment is gone, and tell the peer if it was announced."""
        if number in self._announced:
            self._announced.remove(number)
            self._retired.append(number)
            self._tell_retired()

    def _tell_retired(self) -> bool:
        """Send the waiting Retire messages, or drop them if the peer has gone. Return False if the socket is full."""
        while self._retired:
            try:
                if not send(self._sock, Retire(self._retired[0]), []):
                    return False
            except ConnectionError:
                self._retired.clear()
                return True
            del self._retired[0]
        return True

    def _checked(self, descriptors: list[Descriptor]) -> list[Descriptor]:
        """Drop descriptors of other generations; raise ProtocolError on an unknown kind in ours."""
        current = [d for d in descriptors if d.generation == self.generation]
        for descriptor in current:
            if not 0 < descriptor.kind <= LAST_KIND:
                raise ProtocolError(f"a descriptor of kind {descriptor.kind}")
        return current

    def _other_view(self, address: int, length: int) -> memoryview:
        """Return an extent of a large segment, or raise ProtocolError for an invalid one."""
        if address > OFFSET_MASK:
            self.read_socket()  # its announcement was sent before its descriptor
        return self._inbound.view(address, length)

    def _apply(self, message: Message, fds: list[int]) -> None:
        """Map or unmap a large segment of the peer. Takes over fds."""
        if isinstance(message, Announce):
            self._inbound.announce(message.number, message.nbytes, fds[0])
        elif isinstance(message, Retire):
            self._inbound.retire(message.number)
        else:
            close_all(fds)
            raise ProtocolError("a second offer")


def _accept_offer(message: Message, fds: list[int], generation: int) -> tuple[Segment, RingConsumer]:
    """Map the memory of the peer's offer. Takes over fds. Raises ProtocolError."""
    if not isinstance(message, Offer):
        close_all(fds)
        raise ProtocolError(f"{type(message).__name__} came before the offer")
    ours = (LAYOUT_VERSION, generation)
    theirs = (message.layout_version, message.generation)
    if theirs != ours:
        close_all(fds)
        raise ProtocolError(f"the peer offers (layout, generation) {theirs}, this side {ours}")
    segment_fd, *ring_fds = fds
    try:
        peer = Segment.map_peer(segment_fd, message.segment_bytes)
    except BaseException:
        close_all(ring_fds)
        raise
    try:
        ring_fd, bell_fd, credit_fd = ring_fds
        return peer, RingConsumer.open(ring_fd, bell_fd, credit_fd, message.ring_capacity)
    except BaseException:
        peer.close()
        raise
