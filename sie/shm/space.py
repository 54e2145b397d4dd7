"""Holds a process's shared memory in both directions: outbound for its peers, inbound from one peer.

Each space is a main segment of extents, and the large segments. A frontend has one outbound space for all workers, so
that it can resubmit work to another worker from the same bytes. A worker has one per frontend, so that a frontend that
stopped reading blocks only itself. An inbound space belongs to one attachment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from sie.shm.large import MAX_SEGMENTS, LargeBudget, LargePool
from sie.shm.layout import MAX_SEGMENT_NUMBER, OFFSET_MASK, SEGMENT_SHIFT, ProtocolError
from sie.shm.pool import ExtentPool, Lease, end_released
from sie.shm.segment import Segment
from sie.values.work_bytes import PROLOGUE_BYTES

LARGE_EXTENT_BYTES: Final = 8 << 20
"""Payloads over this size get their own segment."""


class OutboundSpace:
    """Leases on memory that peers map read-only."""

    __slots__ = ("_large_extent_bytes", "_segment", "large", "pool", "retire_listeners")

    def __init__(self, name: str, segment: Segment, budget: LargeBudget, large_extent_bytes: int) -> None:
        self._segment = segment
        self._large_extent_bytes = large_extent_bytes
        self.retire_listeners: list[Callable[[int], None]] = []
        """Called with the number of each retired large segment; each attachment adds itself."""
        self.pool = ExtentPool(segment.view)
        self.large = LargePool(name, budget, self._retired)

    @classmethod
    def create(
        cls, name: str, segment_bytes: int, budget: LargeBudget, *, large_extent_bytes: int = LARGE_EXTENT_BYTES
    ) -> OutboundSpace:
        """Reserve a segment of segment_bytes, a multiple of 64. Raises ReservationError."""
        return cls(name, Segment.create(name, segment_bytes), budget, large_extent_bytes)

    @property
    def fd(self) -> int:
        """The main segment's fd."""
        return self._segment.fd

    @property
    def nbytes(self) -> int:
        """Size of the main segment."""
        return self._segment.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the main segment that are not leased."""
        return self.pool.free_bytes

    @property
    def num_leased(self) -> int:
        """Number of leases that have not ended, in the main segment and in large ones."""
        return self.pool.num_leased + self.large.num_leased

    def lease(self, nbytes: int) -> Lease | None:
        """Return a lease on at least nbytes, or None when there is no room, which is an ordinary answer."""
        if nbytes > self._large_extent_bytes:
            return self.large.lease(nbytes)
        return self.pool.lease(nbytes)

    def can_hold(self, nbytes: int) -> bool:
        """Whether there is room for a lease of nbytes when nothing else is leased, and the host is not short of memory."""
        return self.large.can_hold(nbytes) if nbytes > self._large_extent_bytes else nbytes <= self.nbytes

    def end_released(self, address: int) -> Lease:
        """End the lease that a peer's RELEASE names, and return it. Raises ProtocolError if it was not handed over."""
        return end_released(self.large if address > OFFSET_MASK else self.pool, address)

    def close(self) -> None:
        """Give all memory back. Call it only when every peer is proven dead, or this process ends."""
        self.large.close()
        self.pool.close()
        self._segment.close()

    def _retired(self, number: int) -> None:
        for listener in self.retire_listeners:
            listener(number)


class InboundSpace:
    """A peer's memory, mapped read-only. Every address and number comes from the peer and is checked."""

    __slots__ = ("_large", "main")

    def __init__(self, main: Segment) -> None:
        """Take over the peer's main segment."""
        self.main = main
        self._large: dict[int, Segment] = {}

    def view(self, address: int, length: int) -> memoryview:
        """Return an extent, read-only and exactly length bytes.

        Raises ProtocolError when it is not aligned, has no room for a prologue, or is not inside a known segment.
        """
        number, offset = address >> SEGMENT_SHIFT, address & OFFSET_MASK
        segment = self._large.get(number) if number else self.main
        if segment is None:
            raise ProtocolError(f"a descriptor in segment {number}, which was not announced")
        if offset & 63 or length < PROLOGUE_BYTES or offset + length > segment.nbytes:
            raise ProtocolError(f"{length} bytes at {offset} in segment {number} of {segment.nbytes} bytes")
        return segment.view[offset : offset + length]

    def announce(self, number: int, nbytes: int, fd: int) -> None:
        """Map a large segment. Always closes fd. Raises ProtocolError on an invalid number or too many segments."""
        is_new = 0 < number <= MAX_SEGMENT_NUMBER and number not in self._large
        if not is_new or len(self._large) >= MAX_SEGMENTS:
            os.close(fd)
            raise ProtocolError(f"segment {number} was announced beside {len(self._large)} others")
        self._large[number] = Segment.map_peer(fd, nbytes)

    def retire(self, number: int) -> None:
        """Unmap a large segment. Raises ProtocolError when no segment has this number."""
        segment = self._large.pop(number, None)
        if segment is None:
            raise ProtocolError(f"segment {number} was retired, but never announced")
        segment.close()

    def close(self) -> None:
        """Unmap everything."""
        self.main.close()
        for segment in self._large.values():
            segment.close()
        self._large.clear()
