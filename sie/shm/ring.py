"""Keeps the order between two processes: a single-producer, single-consumer ring of descriptors.

The ring's memory contains only descriptors: no head, no tail, no flag. Two eventfds carry the counts.

    producer                                  consumer
    write descriptors k to k + m - 1          n = read(bell)          takes the whole count
    write(bell, m)          --- bell --->     copy exactly n out
    n = read(credit)        <-- credit --     write(credit, n)        once per drain

A producer starts with `capacity` credits and spends one per descriptor, so it never overwrites a slot that is not yet
copied out. The system calls on one eventfd take one kernel lock, which orders the bytes on x86 and ARM alike. An added
count cannot be missed, so no wake-up is lost and polling is not needed.

Neither side is thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import starmap
from os import close, eventfd_read, eventfd_write

from sie.shm.layout import DESCRIPTOR, DESCRIPTOR_BYTES, Descriptor, ProtocolError
from sie.shm.segment import Segment, doorbell

_pack_into = DESCRIPTOR.pack_into
_iter_unpack = DESCRIPTOR.iter_unpack


def is_capacity(capacity: int) -> bool:
    """Whether a ring can have this many descriptors: a power of two from 2 to 65,536."""
    return 2 <= capacity <= 1 << 16 and not capacity & (capacity - 1)


class RingProducer:
    """The writing end: owns the ring's memory and both doorbells."""

    __slots__ = ("_bell", "_capacity", "_credit", "_credits", "_mask", "_num_staged", "_segment", "_tail", "_view")

    def __init__(self, segment: Segment, bell: int, credit: int) -> None:
        self._segment = segment
        self._view = segment.view
        self._bell = bell
        self._credit = credit
        self._capacity = segment.nbytes // DESCRIPTOR_BYTES
        self._mask = segment.nbytes - 1
        self._tail = 0
        self._num_staged = 0
        self._credits = self._capacity

    @classmethod
    def create(cls, capacity: int) -> RingProducer:
        """Return an empty ring of capacity descriptors, a power of two. Raises ReservationError, or OSError without a descriptor."""
        if not is_capacity(capacity):
            raise ValueError(f"a ring's capacity is a power of two from 2 to 65536, not {capacity}")
        with ExitStack() as made:
            segment = made.enter_context(closing(Segment.create("ring", capacity * DESCRIPTOR_BYTES)))
            bell = doorbell()
            made.callback(close, bell)
            producer = cls(segment, bell, doorbell())
            made.pop_all()
        return producer

    @property
    def fds(self) -> tuple[int, int, int]:
        """The ring's memory, bell and credit, for the consumer; they stay owned by this object."""
        return self._segment.fd, self._bell, self._credit

    @property
    def num_credits(self) -> int:
        """Number of descriptors that can be pushed now. Raises ProtocolError on credit that was never spent."""
        return self._collect_credit()

    def stage(  # noqa: PLR0917  # a descriptor's fields in its order; keywords cost 0.1 us here
        self,
        kind: int,
        flags: int,
        generation: int,
        request_id: int,
        offset: int,
        length: int,
        deadline_ns: int,
        num_tokens: int,
        part: int,
        parts: int,
    ) -> bool:
        """Write one descriptor, for `publish`; return False, without effect, when the ring is full. Never waits.

        Raises ProtocolError when the peer broke the doorbells, struct.error on a value wider than its field.
        """
        if not self._credits and not self._collect_credit():
            return False
        tail = self._tail
        _pack_into(
            self._view, tail, kind, flags, generation, request_id, offset, length, deadline_ns, num_tokens, part, parts
        )
        self._tail = (tail + DESCRIPTOR_BYTES) & self._mask
        self._credits -= 1
        self._num_staged += 1
        return True

    def publish(self) -> None:
        """Publish the staged descriptors, with one doorbell. Raises ProtocolError when the peer broke the doorbell."""
        num_staged, self._num_staged = self._num_staged, 0
        if num_staged:
            # ORDER: only after the descriptors' bytes; the kernel lock in here publishes them to `drain`.
            _ring(self._bell, num_staged)

    def push(self, *fields: int) -> bool:
        """Stage one descriptor as `stage` does, and publish all staged ones."""
        if not self.stage(*fields):
            return False
        self.publish()
        return True

    def stage_extents(self, generation: int, extents: Sequence[tuple[int, int, int, int]]) -> int:
        """Stage as many descriptors of (kind, request_id, offset, length) as fit, in order; return their number.

        Their other fields are empty. Raises as `stage` does.
        """
        num_fit = len(extents)
        if self._credits < num_fit:
            num_fit = min(num_fit, self._collect_credit())
            extents = extents[:num_fit]
        view, tail, mask = self._view, self._tail, self._mask
        for kind, request_id, offset, length in extents:
            _pack_into(view, tail, kind, 0, generation, request_id, offset, length, 0, 0, 0, 1)
            tail = (tail + DESCRIPTOR_BYTES) & mask
        self._tail = tail
        self._credits -= num_fit
        self._num_staged += num_fit
        return num_fit

    def close(self) -> None:
        """Give back the memory and both doorbells; a second call does nothing."""
        if self._bell < 0:
            return
        self._view = memoryview(b"")
        self._segment.close()
        close(self._bell)
        close(self._credit)
        self._bell = self._credit = -1
        self._num_staged = 0

    def _collect_credit(self) -> int:
        """Collect returned credit; return how many descriptors can be pushed."""
        try:
            # ORDER: pairs with `drain`; a slot whose credit we read here has been copied out.
            num_credits = self._credits + eventfd_read(self._credit)
        except BlockingIOError:
            return self._credits
        if num_credits > self._capacity:
            raise ProtocolError(f"{num_credits} credits in a ring of {self._capacity} descriptors")
        self._credits = num_credits
        return num_credits


class RingConsumer:
    """The reading end: maps the ring read-only and copies descriptors out."""

    __slots__ = ("_capacity", "_credit", "_head", "_segment", "_view", "bell_fd")

    def __init__(self, segment: Segment, bell_fd: int, credit_fd: int) -> None:
        self._segment = segment
        self._view = segment.view
        self._capacity = segment.nbytes // DESCRIPTOR_BYTES
        self._head = 0
        self._credit = credit_fd
        self.bell_fd = bell_fd
        """Readable while descriptors wait; for `add_reader` or epoll."""

    @classmethod
    def open(cls, ring_fd: int, bell_fd: int, credit_fd: int, capacity: int) -> RingConsumer:
        """Map the ring of a producer that announced capacity. Takes over all three fds.

        Raises ProtocolError when the memory is not sealed or has another size, or the capacity is invalid.
        """
        try:
            # An invalid capacity becomes 0 bytes, which `map_peer` rejects.
            segment = Segment.map_peer(ring_fd, capacity * DESCRIPTOR_BYTES if is_capacity(capacity) else 0)
        except BaseException:
            close(bell_fd)
            close(credit_fd)
            raise
        return cls(segment, bell_fd, credit_fd)

    def drain(self) -> list[Descriptor]:
        """Copy out every descriptor published so far, oldest first, and return their credit. Never waits.

        Raises ProtocolError when the doorbell counts more descriptors than the ring has.
        """
        try:
            # ORDER: pairs with `publish`; after this read the bytes of `count` descriptors are visible.
            count = eventfd_read(self.bell_fd)
        except BlockingIOError:
            return []
        if count > self._capacity:
            raise ProtocolError(f"the doorbell counts {count} descriptors in a ring of {self._capacity}")
        head = self._head
        end = head + count * DESCRIPTOR_BYTES
        nbytes = self._segment.nbytes
        descriptors = list(starmap(Descriptor, _iter_unpack(self._view[head : min(end, nbytes)])))
        if end > nbytes:
            descriptors += starmap(Descriptor, _iter_unpack(self._view[: end - nbytes]))
        self._head = end & (nbytes - 1)
        # ORDER: only after the copies; the producer may now write these slots again.
        _ring(self._credit, count)
        return descriptors

    def close(self) -> None:
        """Unmap the ring and close both doorbells; a second call does nothing."""
        if self.bell_fd < 0:
            return
        self._view = memoryview(b"")
        self._segment.close()
        close(self.bell_fd)
        close(self._credit)
        self.bell_fd = self._credit = -1


def _ring(doorbell_fd: int, count: int) -> None:
    """Add count to a doorbell. Raises ProtocolError when a peer made it overflow."""
    try:
        eventfd_write(doorbell_fd, count)
    except BlockingIOError as error:
        raise ProtocolError("a doorbell is filled up") from error
