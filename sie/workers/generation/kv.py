"""Tracks which key/value cache blocks are held, cached or free. Pure: numbers and hashes, no memory.

A held block has one holder for each sequence that reads it. A full block can be entered under a key, the hash of all
tokens up to its end (`block_key`). Other sequences with the same beginning then find it, even after its last holder has
released it. Such a block is cached, and the block that was released first is evicted first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_KEY_BYTES = 16


def block_key(before: bytes, token_ids: memoryview | bytes) -> bytes:
    """Return the key of a block. before is the key of the previous block, or `first_key` for the first block."""
    return hashlib.blake2b(token_ids, digest_size=_KEY_BYTES, key=before).digest()


def first_key(salt: bytes, rotary_length: int = 0) -> bytes:
    """Return the key before the first block. Prompts with different salts or rotary factors share no blocks."""
    length = rotary_length.to_bytes(8, "little")
    return hashlib.blake2b(salt, digest_size=_KEY_BYTES, salt=length, person=b"sie prefix").digest()


class BlockPool:
    """The blocks of one model."""

    __slots__ = ("_block_of", "_cached", "_free", "_holders", "_key_of", "num_blocks", "num_evicted")

    def __init__(self, num_blocks: int) -> None:
        """Start with all blocks free, numbers 0 to num_blocks - 1."""
        self.num_blocks = num_blocks
        self.num_evicted = 0
        """Cached blocks that were evicted."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return, including cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks without a holder that `find` can still return."""
        return len(self._cached)

    def allocate(self) -> int | None:
        """Return a block with one holder and undefined contents, or None when every block is held."""
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
        """Return the block that was entered under a key. The caller must `hold` it before use."""
        return self._block_of.get(key)

    def hold(self, block: int) -> None:
        """Add a holder to a block that is held or cached."""
        if not self._holders[block]:
            del self._cached[block]
        self._holders[block] += 1

    def num_holders(self, block: int) -> int:
        """Return the number of a block's holders; if there are several, none of them may write to it."""
        return self._holders[block]

    def enter(self, block: int, key: bytes) -> None:
        """Make a full, held block findable under a key, unless the key or the block is already entered."""
        assert self._holders[block]
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def let_go(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. Blocks that become cached are evicted in the order given here."""
        for block in blocks:
            self._holders[block] -= 1
            assert self._holders[block] >= 0, "a block that nobody held was let go"
            if not self._holders[block]:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def let_go_sequence(self, blocks: Sequence[int]) -> None:
        """Release a sequence's blocks, the last one first: the beginning is the most useful to share."""
        self.let_go(reversed(blocks))
