"""The pool against a plain list: no overlap, nothing lost, and all of it back in one piece at the end."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sie.shm.pool import ExtentPool, Lease
from tests.property.lives import live, note


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.leases: list[Lease] = []
        self.handed_over: set[Lease] = set()

    @initialize(units=st.integers(1, 200))
    def start(self, units: int) -> None:
        # 16 x k units: a size that is its own class, so that one lease can take everything.
        units = units if units < 32 else units // 16 * 16
        self.pool = ExtentPool(memoryview(bytearray(64 * units)))

    @rule(nbytes=st.one_of(st.integers(0, 300), st.integers(0, 14_000)))
    def lease(self, nbytes: int) -> None:
        lease = self.pool.lease(nbytes)
        if lease is None:
            note("full")
            return
        assert lease.nbytes >= nbytes
        assert lease.address % 64 == 0
        self.leases.append(lease)

    @rule(pick=st.integers(0, 10_000))
    def hand_over(self, pick: int) -> None:
        fresh = [lease for lease in self.leases if lease not in self.handed_over]
        if fresh:
            lease = fresh[pick % len(fresh)]
            lease.hand_over(pick)
            self.handed_over.add(lease)
            note("handed over")

    @rule(pick=st.integers(0, 10_000), num=st.integers(1, 8))
    def end(self, pick: int, num: int) -> None:
        for _ in range(min(num, len(self.leases))):
            self.leases.pop(pick % len(self.leases)).end()

    @rule()
    def end_all(self) -> None:
        for lease in self.leases:
            lease.end()
        self.leases.clear()
        whole = self.pool.lease(self.pool.nbytes)
        assert whole is not None, "free bytes that no lease can get"
        whole.end()
        note("whole again")

    @invariant()
    def leased_and_free_are_the_whole_segment(self) -> None:
        if not hasattr(self, "pool"):
            return
        taken = sorted((lease.address, lease.address + lease.nbytes) for lease in self.leases)
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert all(0 <= start < end <= self.pool.nbytes for start, end in taken)
        assert sum(end - start for start, end in taken) + self.pool.free_bytes == self.pool.nbytes
        assert self.pool.num_leased == len(self.leases)
        assert set(self.pool.handed_over) == {lease.address for lease in self.leases if lease in self.handed_over}


def test_pool_agrees_with_the_model() -> None:
    live(PoolMachine, "full", "handed over", "whole again", lives=150, steps=40, times=20)
