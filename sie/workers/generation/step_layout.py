"""Lays out the tokens of a generating step: their order in its row, their key/value rows, and their visible blocks.

Pure arithmetic on block numbers, in numpy. A step's row starts with the sequences that decode one token, sorted by
length. The prefill chunks follow one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.workers.model_api import Slot


class DecodeGroup(NamedTuple):
    """Tokens first to first + n - 1 of a step's row, each the last of its sequence, that read their blocks together.

    table (n, m) int64 has each token's visible blocks, padded with the spare block. Of the m * block_tokens rows in the
    table, token i sees those from starts[i] up to, but not including, ends[i], both (n,) int64.
    """

    first: int
    table: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class PromptPart(NamedTuple):
    """A prefill chunk: tokens first to first + length - 1 of a step's row, consecutive in one sequence.

    blocks (m,) int64 are the visible blocks. `offset` is the first token's row in them. A token sees at most `window`
    rows, up to its own; None: all rows up to its own.
    """

    first: int
    length: int
    blocks: NDArray[np.int64]
    offset: int
    window: int | None


class Reach(NamedTuple):
    """The visible rows of a step's tokens in layers with the same window."""

    groups: tuple[DecodeGroup, ...]
    parts: tuple[PromptPart, ...]


class StepLayout(NamedTuple):
    """One step's row: token_ids, positions and rows (t,) int64; rows are numbered across all blocks.

    ends[i] is the index of the i-th slot's last token in the row. unfilled are the blocks that the step starts but does
    not fill. decodes and prompts are the slots in the row's order. drawn (t,) int64 has the places of tokens among the
    draws of the step before (`Slot.drawn`), -1 for a token that is known; None if all are.
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
    drawn: NDArray[np.int64] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step."""
        return len(self.token_ids)

    def rotary_lengths(self) -> NDArray[np.int64]:
        """Return, for each token (t,), the sequence length that sets its rotary factors (`Slot`)."""
        slots = (*self.decodes, *self.prompts)
        least = np.repeat([slot.rotary_length for slot in slots], [len(slot.token_ids) for slot in slots])
        return np.maximum(self.positions + 1, least)

    def reach(self, window: int | None) -> Reach:
        """Return the visible rows if each token sees `window` positions up to its own; None: all of them."""
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
    """Return a step's row. spare_block is a block that no sequence owns."""
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
        drawn=_drawn([slots[i] for i in order]),
    )


def _drawn(slots: Sequence[Slot]) -> NDArray[np.int64] | None:
    if all(slot.drawn is None for slot in slots):
        return None
    places = [-1 if slot.drawn is None else slot.drawn for slot in slots]
    return np.repeat(np.array(places, np.int64), [len(slot.token_ids) for slot in slots])


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _num_blocks(slot: Slot, block_tokens: int, window: int | None) -> int:
    return slot.start // block_tokens - _first_seen(slot.start, window) // block_tokens + 1


def _spans(decodes: Sequence[Slot], block_tokens: int, window: int | None) -> list[tuple[int, int]]:
    """Split the decoding sequences so that none is padded to over twice its visible blocks."""
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
