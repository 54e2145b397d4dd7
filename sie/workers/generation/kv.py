"""Keeps the books of the blocks of keys and values: shared, cached or free. Pure: numbers and hashes, no memory.

A block in use has as many holders as sequences that read it. A full one can be entered under a key, the hash of
all tokens up to its end (`block_key`); it is then found by other sequences that begin alike, also when nobody holds it
any more: such blocks are cached, and the one that was let go first is the first to be used for something else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_KEY_BYTES = 16


def block_key(before: bytes, token_ids: memoryview | bytes) -> bytes:
    """Return the key of a block: before is that of the block in front of it, or for the first one the salt."""
    return hashlib.blake2b(token_ids, digest_size=_KEY_BYTES, key=before).digest()


def first_key(salt: bytes, rotary_length: int = 0) -> bytes:
    """Return what stands for the block in front of the first one: prompts of different salts or factors share nothing."""
    length = rotary_length.to_bytes(8, "little")
    return hashlib.blake2b(salt, digest_size=_KEY_BYTES, salt=length, person=b"sie prefix").digest()


class BlockPool:
    """The blocks of one model."""

    __slots__ = ("_block_of", "_cached", "_free", "_holders", "_key_of", "num_blocks", "num_evicted")

    def __init__(self, num_blocks: int) -> None:
        """Begin with all blocks free, numbers 0 to num_blocks - 1."""
        self.num_blocks = num_blocks
        self.num_evicted = 0
        """Cached blocks that were taken for something else."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that can still be found."""
        return len(self._cached)

    def allocate(self) -> int | None:
        """Return a block with one holder, its contents of no meaning; None when every block is held."""
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self.num_evicted += 1
        else:
            return None
        self._holders[block] = 1
        return block

    def find(self, key: bytes) -> int | None:
        """Return the block that was entered under a key; it is the caller's only after `hold`."""
        return self._block_of.get(key)

    def hold(self, block: int) -> None:
        """Add a holder to a block that is held or cached."""
        if not self._holders[block]:
            del self._cached[block]
        self._holders[block] += 1

    def num_holders(self, block: int) -> int:
        """Return how many hold a block; where there are several, none of them may write to it."""
        return self._holders[block]

    def enter(self, block: int, key: bytes) -> None:
        """Let a full, held block be found under a key, unless another one is there or it has a key."""
        assert self._holders[block]
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def let_go(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block; of those cached thereby the first named is the first to be taken again."""
        for block in blocks:
            self._holders[block] -= 1
            assert self._holders[block] >= 0, "a block that nobody held was let go"
            if not self._holders[block]:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def let_go_sequence(self, blocks: Sequence[int]) -> None:
        """Let a sequence's blocks go, its last one first: a beginning is worth more than what follows it."""
        self.let_go(reversed(blocks))
