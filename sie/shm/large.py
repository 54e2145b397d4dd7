"""Allocates payloads that are too large for the main segment: each in its own segment, under one budget.

A large segment has a number from 1 to 65535, which is the top of its address. It is charged to the budget from its
creation until it is retired, whether leased or idle. A few ended segments are kept, because the first write into new
pages takes twenty times as long as the second. The fd of a segment is sent to a peer once per attachment
(`sie.shm.attach`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

from sie.shm.layout import MAX_SEGMENT_NUMBER, SEGMENT_SHIFT
from sie.shm.pool import Lease, drop_views
from sie.shm.segment import ReservationError, Segment

MAX_IDLE: Final = 4
MAX_SEGMENTS: Final = 256
"""Most large segments of one owner at a time; a peer refuses more, because each costs it a file descriptor."""


class LargeBudget:
    """This process's share of the host's `max_large_bytes`, for all its spaces together."""

    __slots__ = ("_pools", "max_bytes", "used_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._pools: dict[LargePool, None] = {}

    def join(self, pool: LargePool) -> None:
        """Let a pool charge this budget; the pool gives up idle segments when another pool needs their bytes."""
        self._pools[pool] = None

    def leave(self, pool: LargePool) -> None:
        """Remove a closed pool; a second call does nothing."""
        self._pools.pop(pool, None)

    def retire_idle(self) -> bool:
        """Make one pool give up an idle segment; False when no pool has one."""
        return any(pool.retire_oldest() for pool in self._pools)

    def try_charge(self, nbytes: int) -> bool:
        """Take nbytes from the budget; return False, without effect, when they are not available."""
        if self.used_bytes + nbytes > self.max_bytes:
            return False
        self.used_bytes += nbytes
        return True

    def refund(self, nbytes: int) -> None:
        """Return nbytes from `try_charge` to the budget."""
        self.used_bytes -= nbytes


class LargePool:
    """The large segments of one owner; a `LeaseOwner`."""

    __slots__ = ("_budget", "_idle", "_last_number", "_name", "_on_retire", "_segments", "handed_over", "num_leased")

    def __init__(self, name: str, budget: LargeBudget, on_retire: Callable[[int], None]) -> None:
        """Join the budget. on_retire is called with the number of each retired segment, so that peers unmap it."""
        self._name = name
        self._budget = budget
        self._on_retire = on_retire
        self._segments: dict[int, Segment] = {}
        self._idle: list[int] = []  # numbers, the longest idle first
        self._last_number = 0
        self.handed_over: dict[int, Lease] = {}
        self.num_leased = 0
        budget.join(self)

    def lease(self, nbytes: int) -> Lease | None:
        """Return a lease on a separate segment of at least nbytes; None when budget or memory do not allow it."""
        nbytes = _in_pages(nbytes)
        number = self._take_idle(nbytes) or self._create(nbytes)
        if not number:
            return None
        self.num_leased += 1
        return Lease(self, number << SEGMENT_SHIFT, self._segments[number].nbytes, self._segments[number].view)

    def can_hold(self, nbytes: int) -> bool:
        """Whether the budget allows a segment of nbytes when nothing else is charged to it."""
        return _in_pages(nbytes) <= self._budget.max_bytes

    def reclaim(self, lease: Lease) -> None:
        """Take back an ended lease; only `Lease.end` calls this."""
        self.num_leased -= 1
        self._idle.append(lease.address >> SEGMENT_SHIFT)
        if len(self._idle) > MAX_IDLE:
            self.retire_oldest()

    def retire_oldest(self) -> bool:
        """Give up the longest idle segment, and its charge; False when no segment is idle."""
        if not self._idle:
            return False
        number = self._idle.pop(0)
        segment = self._segments.pop(number)
        self._on_retire(number)
        self._budget.refund(segment.nbytes)
        segment.close()
        return True

    def segment(self, number: int) -> Segment:
        """Return a live segment, to send it to a peer. Raises KeyError."""
        return self._segments[number]

    def close(self) -> None:
        """Give up all segments without calling on_retire; for an owner that ends."""
        drop_views(self)
        for segment in self._segments.values():
            self._budget.refund(segment.nbytes)
            segment.close()
        self._segments.clear()
        self._idle.clear()
        self._budget.leave(self)

    def _take_idle(self, nbytes: int) -> int:
        """Return the number of the smallest idle segment that fits and is at most twice nbytes, or 0."""
        fitting = [n for n in self._idle if nbytes <= self._segments[n].nbytes <= 2 * nbytes]
        if not fitting:
            return 0
        number = min(fitting, key=lambda n: self._segments[n].nbytes)
        self._idle.remove(number)
        return number

    def _create(self, nbytes: int) -> int:
        """Return the number of a new segment, or 0; retires idle segments, also of other pools, to make room."""
        if len(self._segments) >= MAX_SEGMENTS and not self.retire_oldest():
            return 0
        while not self._budget.try_charge(nbytes):
            if not self._budget.retire_idle():
                return 0
        try:
            segment = Segment.create(f"{self._name}-large", nbytes)
        except ReservationError:
            self._budget.refund(nbytes)
            return 0
        number = self._last_number
        while True:
            # Numbers go round, so that each is reused as late as possible.
            number = number % MAX_SEGMENT_NUMBER + 1
            if number not in self._segments:
                break
        self._last_number = number
        self._segments[number] = segment
        return number


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
