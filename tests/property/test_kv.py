"""Allocation of blocks against plain dictionaries: none lost, none used twice, and the prefix cache finds only entered
prefixes.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sie.workers.generation.kv import BlockPool
from tests.property.lives import live, note


class BlockMachine(RuleBasedStateMachine):
    """`holders` counts who has each block, `keys` is what its contents are, `cached` the free ones in order of release."""

    @initialize(num_blocks=st.integers(1, 5))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holders: Counter[int] = Counter()
        self.keys: dict[int, bytes] = {}
        self.cached: list[int] = []

    def held(self) -> list[int]:
        return sorted(block for block, count in self.holders.items() if count)

    @rule()
    def allocate(self) -> None:
        unkeyed = self.pool.num_blocks - len(self.held()) - len(self.cached)
        block = self.pool.allocate()
        if block is None:
            assert len(self.held()) == self.pool.num_blocks
            note("full")
            return
        assert not self.holders[block], "a block that somebody holds"
        if block in self.cached:
            assert not unkeyed, "a cached block went while another was free"
            assert block == self.cached.pop(0), "not the one that was let go first"
            del self.keys[block]
            note("evicted")
        self.holders[block] = 1

    @rule(pick=st.integers(0, 100), name=st.integers(0, 5))
    def enter(self, pick: int, name: int) -> None:
        held = self.held()
        if not held:
            return
        block, key = held[pick % len(held)], bytes([name])
        self.pool.enter(block, key)
        if key in self.keys.values() or block in self.keys:
            note("known before")
        else:
            self.keys[block] = key

    @rule(name=st.integers(0, 5))
    def use(self, name: int) -> None:
        """Find what was entered under a key and hold it; else enter it."""
        key = bytes([name])
        block = self.pool.find(key)
        if block is None:
            assert key not in self.keys.values()
            self.allocate()
            self.enter(len(self.held()) - 1, name)
            return
        assert self.keys[block] == key
        self.pool.hold(block)
        if not self.holders[block]:
            self.cached.remove(block)
            note("revived")
        self.holders[block] += 1
        if self.holders[block] > 1:
            note("shared")

    @rule(picks=st.lists(st.integers(0, 100), min_size=1, max_size=6))
    def let_go(self, picks: list[int]) -> None:
        gone: list[int] = []
        for pick in picks:
            held = self.held()
            if not held:
                break
            block = held[pick % len(held)]
            gone.append(block)
            self.note_gone(block)
        self.pool.let_go(gone)

    @rule()
    def let_go_all(self) -> None:
        gone = list(self.holders.elements())
        for block in gone:
            self.note_gone(block)
        self.pool.let_go(gone)

    def note_gone(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block] and block in self.keys:
            self.cached.append(block)

    @invariant()
    def every_block_is_held_cached_or_free(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = self.held()
        assert self.pool.num_used == len(held)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        for block in range(self.pool.num_blocks):
            assert self.pool.num_holders(block) == self.holders[block]


def test_books_of_blocks_agree_with_the_model() -> None:
    live(BlockMachine, "full", "evicted", "known before", "revived", "shared", lives=200, steps=40, times=5)
