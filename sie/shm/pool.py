"""Manages the leases on one segment: its free bytes, and the holders of the others. Pure: no system call, no clock.

Only the segment's owner allocates, in private memory, so this state is never shared with or trusted to a peer.

Search for a place: sizes are rounded up to a class: multiples of 64 bytes up to 2 KiB, then 16 classes for each
doubling (at most 1/16 is wasted). Ended extents go to a stack of their class. So the usual lease is one pop, and gets
the bytes used last, which are still in the cache. When that stack is empty, the lease is cut from the smallest class
with a free block, found in a bit map; the rest of the block stays free. When there is none, all stacks are emptied into
blocks, each merged with its free neighbours, and the search is repeated once. So two free neighbours stay apart only
while no lease fails because of it. When MAX_STACKED extents are stacked, those of other classes become blocks. Every
step costs the same for any number of extents: a block is merged once per `end`, and at most MAX_STACKED at a time.
"""

from __future__ import annotations

from typing import Final, Protocol, Self

import msgspec

from sie.shm.layout import ALIGNMENT, ProtocolError

MAX_STACKED: Final = 1024
"""Most stacked extents: about the replies of a large step. Merging them takes about a millisecond."""

_LEASED: Final = 0
_HANDED_OVER: Final = 1
_ENDED: Final = 2
_NO_VIEW: Final = memoryview(b"")
_NUM_BINS: Final = 16 * (64 - 10)


class LeaseOwner(Protocol):
    """The owner to which a lease returns."""

    handed_over: dict[int, Lease]

    def reclaim(self, lease: Lease) -> None:
        """Take back the extent of an ended lease; called once."""
        ...


class Lease(msgspec.Struct, eq=False):
    """The right to use one extent: leased, then handed over to a peer, then ended; or ended at once.

    address goes into a descriptor's `offset`. nbytes is the usable size, at least the requested one. view is the
    writable extent, 64-byte aligned, with leftover bytes of an earlier lease. As a context manager, it ends a lease
    that was not handed over.
    """

    _owner: LeaseOwner
    address: int
    nbytes: int
    view: memoryview
    request_id: int = 0
    _state: int = _LEASED

    def hand_over(self, request_id: int) -> None:
        """Record that a descriptor with this extent was pushed; from now on only `end` gives it back."""
        if self._state != _LEASED:
            raise AssertionError("only a fresh lease can be handed over")
        self._state = _HANDED_OVER
        self.request_id = request_id
        self._owner.handed_over[self.address] = self

    def end(self) -> None:
        """Give the extent back. A second end is an AssertionError, because another lease may have the bytes then."""
        state = self._state
        if state == _ENDED:
            raise AssertionError("this lease has ended before")
        self._state = _ENDED
        owner = self._owner
        if state == _HANDED_OVER:
            del owner.handed_over[self.address]
        self.view = _NO_VIEW  # a late write must fail here instead of changing the next lease's bytes
        owner.reclaim(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._state == _LEASED:
            self.end()


def end_released(owner: LeaseOwner, address: int) -> Lease:
    """End the handed-over lease that a peer's RELEASE names, and return it. Raises ProtocolError if it is unknown."""
    lease = owner.handed_over.get(address)
    if lease is None:
        raise ProtocolError(f"released an extent at {address:#x} that was not handed over")
    lease.end()
    return lease


def drop_views(owner: LeaseOwner) -> None:
    """Drop the views of leases that no peer will give back.

    These leases and their owner refer to each other, so their views would keep the memory mapped until the garbage
    collector runs.
    """
    for lease in owner.handed_over.values():
        lease.view = _NO_VIEW


class ExtentPool:
    """The free and leased extents of one block of memory."""

    __slots__ = ("_bins", "_bitmap", "_free_sizes", "_free_starts", "_num_stacked", "_stacks", "_view",
                 "free_bytes", "handed_over", "nbytes", "num_leased")  # fmt: skip

    def __init__(self, view: memoryview) -> None:
        """Manage view, writable unsigned bytes; its size is a positive multiple of 64."""
        if view.nbytes <= 0 or view.nbytes % ALIGNMENT:
            raise ValueError(f"a pool needs a positive multiple of {ALIGNMENT} bytes, not {view.nbytes}")
        self._view = view
        self._bins: list[dict[int, None]] = [{} for _ in range(_NUM_BINS)]  # block start, newest last
        self._bitmap = 0  # bit b: _bins[b] is not empty
        self._free_sizes: dict[int, int] = {}  # of the blocks in _bins, by start
        self._free_starts: dict[int, int] = {}  # of the blocks in _bins, by end
        self._stacks: dict[int, list[int]] = {}  # starts of ended extents, by size
        self._num_stacked = 0
        self.handed_over: dict[int, Lease] = {}
        """Leases that a peer may be using, by address."""
        self.nbytes = view.nbytes
        self.free_bytes = view.nbytes
        self.num_leased = 0
        self._insert(0, view.nbytes)

    def lease(self, nbytes: int) -> Lease | None:
        """Return a lease on at least nbytes (>= 0), or None without a free place that is large enough."""
        size = (nbytes + 63) & ~63 or ALIGNMENT
        if size > 2048:
            shift = size.bit_length() - 5
            size = -(-size >> shift) << shift
        stack = self._stacks.get(size)
        if stack:
            start = stack.pop()
            self._num_stacked -= 1
        else:
            start = self._cut(size)
            if start < 0:
                return None
        self.free_bytes -= size
        self.num_leased += 1
        return Lease(self, start, size, self._view[start : start + size])

    def reclaim(self, lease: Lease) -> None:
        """Take back an ended lease; only `Lease.end` calls this."""
        size = lease.nbytes
        self.free_bytes += size
        self.num_leased -= 1
        if self._num_stacked >= MAX_STACKED:
            self._merge_stacked(but=size)
            if self._num_stacked >= MAX_STACKED:
                self._free(lease.address, size)
                return
        stack = self._stacks.get(size)
        if stack is None:
            stack = self._stacks[size] = []
        stack.append(lease.address)
        self._num_stacked += 1

    def close(self) -> None:
        """Drop the memory, so that it can be unmapped; do not lease or end leases afterwards."""
        self._view = _NO_VIEW
        drop_views(self)

    def _cut(self, size: int) -> int:
        """Take size bytes from the smallest suitable free block; return their start, or -1."""
        if size > self.free_bytes:
            return -1
        index = _bin_of(size)
        if not self._bitmap >> index:
            self._merge_stacked()
        larger = self._bitmap >> index
        if not larger:
            return -1
        index += (larger & -larger).bit_length() - 1
        start, _ = self._bins[index].popitem()
        block = self._free_sizes[start]
        self._forget(start, block, index)
        if block > size:
            self._insert(start + size, block - size)
        return start

    def _merge_stacked(self, but: int = 0) -> None:
        """Turn all stacked extents except those of size `but` into free blocks, merged with adjacent free blocks."""
        kept = self._stacks.pop(but, None)
        for size, stack in self._stacks.items():
            for start in stack:
                self._free(start, size)
        self._stacks = {} if kept is None else {but: kept}
        self._num_stacked = 0 if kept is None else len(kept)

    def _free(self, start: int, size: int) -> None:
        before = self._free_starts.get(start)
        if before is not None:
            size_before = self._free_sizes[before]
            self._remove(before, size_before)
            start, size = before, size + size_before
        size_after = self._free_sizes.get(start + size)
        if size_after is not None:
            self._remove(start + size, size_after)
            size += size_after
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        index = _bin_of(size)
        self._bins[index][start] = None
        self._bitmap |= 1 << index
        self._free_sizes[start] = size
        self._free_starts[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        index = _bin_of(size)
        del self._bins[index][start]
        self._forget(start, size, index)

    def _forget(self, start: int, size: int, index: int) -> None:
        """Remove the records of a block that has just left its bin."""
        if not self._bins[index]:
            self._bitmap &= ~(1 << index)
        del self._free_sizes[start]
        del self._free_starts[start + size]


def _bin_of(size: int) -> int:
    """Return the bin of blocks of size bytes: bin k + 1 holds only blocks larger than those in bin k."""
    units = size >> 6
    shift = max(0, units.bit_length() - 5)
    return (shift << 4) + (units >> shift)
