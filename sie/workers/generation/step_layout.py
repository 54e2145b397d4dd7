"""Lays out the tokens of a generating step: in its row, in the blocks of keys and values, and what each may see.

Pure arithmetic on numbers of blocks, in numpy. A step's row holds the sequences that decode one token first, those of
like length side by side, and behind them the parts of prompts one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.workers.model_api import Slot


class DecodeGroup(NamedTuple):
    """Tokens first to first + n of a step's row, each the last of its sequence, that read their blocks together.

    table (n, m) int64 has the blocks that each one sees, filled up with the block behind the last. Of the m * block_tokens
    rows there it sees those from starts[i] up to and not including ends[i], both (n,) int64.
    """

    first: int
    table: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class PromptPart(NamedTuple):
    """Tokens first to first + length of a step's row, which follow each other in one sequence.

    blocks (m,) int64 are those they see. In the rows there the first of them stands at `offset`, and sees no more than
    `window` rows, itself the last; None: all before it.
    """

    first: int
    length: int
    blocks: NDArray[np.int64]
    offset: int
    window: int | None


class Reach(NamedTuple):
    """What the tokens of a step see in layers of one window."""

    groups: tuple[DecodeGroup, ...]
    parts: tuple[PromptPart, ...]


class StepLayout(NamedTuple):
    """One step's row: token_ids, positions and rows (t,) int64; rows count through all blocks.

    ends[i] is where the last token of the i-th slot stands in the row. unfilled are the blocks that the step begins and
    does not fill. decodes and prompts are the slots in the row's order.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    ends: tuple[int, ...]
    unfilled: tuple[int, ...]
    decodes: tuple[Slot, ...]
    prompts: tuple[Slot, ...]
    block_tokens: int
    spare_block: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.token_ids)

    def rotary_lengths(self) -> NDArray[np.int64]:
        """Return of each token (t,) the length of the sequence whose rotary factors it has (`Slot`)."""
        slots = (*self.decodes, *self.prompts)
        least = np.repeat([slot.rotary_length for slot in slots], [len(slot.token_ids) for slot in slots])
        return np.maximum(self.positions + 1, least)

    def reach(self, window: int | None) -> Reach:
        """Return what the tokens see where a token sees `window` positions, its own the last of them; None: all."""
        groups = tuple(
            _decode_group(self, first, last, window) for first, last in _spans(self.decodes, self.block_tokens, window)
        )
        parts: list[PromptPart] = []
        first = len(self.decodes)
        for slot in self.prompts:
            parts.append(_prompt_part(slot, first, self.block_tokens, window))
            first += len(slot.token_ids)
        return Reach(groups, tuple(parts))


def lay_out(slots: Sequence[Slot], block_tokens: int, spare_block: int) -> StepLayout:
    """Return a step's row. spare_block is a block that nothing is ever written to."""
    lengths = [len(slot.token_ids) for slot in slots]
    order = sorted(range(len(slots)), key=lambda i: (lengths[i] > 1, slots[i].start if lengths[i] == 1 else 0))
    ends = [0] * len(slots)
    unfilled: list[int] = []
    rows: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    num_tokens = 0
    for i in order:
        slot, length = slots[i], lengths[i]
        num_tokens += length
        ends[i] = num_tokens - 1
        own = np.arange(slot.start, slot.start + length)
        last = slot.start + length
        begun = last // block_tokens
        if last % block_tokens and begun * block_tokens >= slot.start:
            unfilled.append(slot.blocks[begun])
        first_block = slot.start // block_tokens
        blocks = np.array(slot.blocks[first_block : (last - 1) // block_tokens + 1], np.int64)
        rows.append(blocks[own // block_tokens - first_block] * block_tokens + own % block_tokens)
        positions.append(own)
    num_decodes = sum(length == 1 for length in lengths)
    return StepLayout(
        token_ids=np.concatenate([slots[i].token_ids for i in order]).astype(np.int64),
        positions=np.concatenate(positions),
        rows=np.concatenate(rows),
        ends=tuple(ends),
        unfilled=tuple(unfilled),
        decodes=tuple(slots[i] for i in order[:num_decodes]),
        prompts=tuple(slots[i] for i in order[num_decodes:]),
        block_tokens=block_tokens,
        spare_block=spare_block,
    )


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _num_blocks(slot: Slot, block_tokens: int, window: int | None) -> int:
    return slot.start // block_tokens - _first_seen(slot.start, window) // block_tokens + 1


def _spans(decodes: Sequence[Slot], block_tokens: int, window: int | None) -> list[tuple[int, int]]:
    """Cut the decoding sequences so that none is filled up to over twice the blocks it sees."""
    spans: list[tuple[int, int]] = []
    first = least = most = 0
    for i, slot in enumerate(decodes):
        num = _num_blocks(slot, block_tokens, window)
        if i > first and max(most, num) > 2 * min(least, num):
            spans.append((first, i))
            first = i
        least, most = (num, num) if i == first else (min(least, num), max(most, num))
    if decodes:
        spans.append((first, len(decodes)))
    return spans


def _decode_group(layout: StepLayout, first: int, last: int, window: int | None) -> DecodeGroup:
    slots = layout.decodes[first:last]
    size = layout.block_tokens
    width = max(_num_blocks(slot, size, window) for slot in slots)
    table = np.full((len(slots), width), layout.spare_block, np.int64)
    starts = np.empty(len(slots), np.int64)
    ends = np.empty(len(slots), np.int64)
    for i, slot in enumerate(slots):
        seen = _first_seen(slot.start, window)
        skipped = seen // size
        own = slot.blocks[skipped : slot.start // size + 1]
        table[i, : len(own)] = own
        starts[i] = seen - skipped * size
        ends[i] = slot.start + 1 - skipped * size
    return DecodeGroup(first, table, starts, ends)


def _prompt_part(slot: Slot, first: int, block_tokens: int, window: int | None) -> PromptPart:
    length = len(slot.token_ids)
    skipped = _first_seen(slot.start, window) // block_tokens
    blocks = np.array(slot.blocks[skipped : (slot.start + length - 1) // block_tokens + 1], np.int64)
    reaches_all = window is None or window >= slot.start + length
    return PromptPart(first, length, blocks, slot.start - skipped * block_tokens, None if reaches_all else window)
