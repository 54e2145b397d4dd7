"""Captures small steps on a GPU as CUDA graphs: decode steps, and those with short prefill chunks.

When tokens are few, launching a model's kernels one by one takes longer than running them. All graphs are captured at
load, for token counts that are powers of two. Every token has a column of blocks of its own, so the tokens of a prefill
chunk are like sequences that share blocks: each layer stores all keys before a token reads those up to its own. A step
takes the next larger graph and pads it with tokens in the spare block, which nobody reads. The graph includes the logits
of the kept tokens and the likeliest token of each. So a greedy step is two copies in, one launch and one copy out. All
other sampling runs outside the graph. A step that begins before the one before has been read takes tokens from that
step's result on the device (`feed`). Larger steps are not divided (docs/decisions/092).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sie.workers.device.capture import Capturer
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import raise_if_lost
from sie.workers.device.memory import free_cached
from sie.workers.generation.given_tokens import kept_rows
from sie.workers.generation.paged_cache import PagedCache
from sie.workers.generation.sampling import likeliest
from sie.workers.generation.varlen import DecodeStep
from sie.workers.model_api import Slot

_LARGEST = 256
"""Tokens of the largest captured step. With more, computing them takes about as long as launching the kernels."""
_MOST_SEEN = 1 << 16
"""Rows of keys that the tokens of prefill chunks may read in a captured step, each token its own. With 128 KiB a row in
all layers these are 8 GiB, half of what 8 billion weights take. A chunk of 256 tokens reads 32,896."""

Forward = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes token ids and positions (1, t), the kept tokens (k,) and rotary lengths (t,); returns (k, vocabulary)."""


class Answers(NamedTuple):
    """Logits (k, vocabulary) after the k kept tokens; best (k,) is the result of `likeliest`, None if not computed yet."""

    logits: Tensor
    best: Tensor | None = None


class StepInputs:
    """The device inputs of a step of up to `size` tokens, and the page-locked memory to copy them from."""

    def __init__(self, size: int, max_kept: int, max_blocks: int, device: torch.device) -> None:
        """Allocate room for max_kept tokens with logits, and for sequences of up to max_blocks blocks."""
        is_locked = device.type == "cuda"
        self.size = size
        self._numbers = torch.zeros(6, size, dtype=torch.int64, pin_memory=is_locked)
        self._blocks = torch.zeros(max_blocks, size, dtype=torch.int32, pin_memory=is_locked)
        self._on_device = torch.zeros(6, size, dtype=torch.int64, device=device)
        self.numbers = self._on_device[:4]
        """Token ids, positions, their rows in the key/value cache, and their rotary lengths (`Slot`)."""
        self.kept = self._on_device[5, :max_kept]
        """The tokens whose logits are needed."""
        self.blocks = torch.zeros(max_blocks, size, dtype=torch.int32, device=device)
        """As in `kernels.Tables`."""
        self._known: list[Sequence[int]] = [()] * size
        """The blocks in each column, in both tables. Those below them have no meaning."""

    def fill(
        self,
        slots: Sequence[Slot],
        kept: Sequence[int],
        block_tokens: int,
        spare_block: int,
        drawn: Tensor | None = None,
    ) -> None:
        """Write the slots' tokens one after another, the padding, and the kept tokens.

        drawn (n,) int64 are the tokens that the draws of the step before chose, for `Slot.drawn`. The copies of the
        previous call must have finished.
        """
        numbers = self._numbers.numpy()
        counts = [len(slot.token_ids) for slot in slots]
        count = sum(counts)
        owners = [slot for slot, own in zip(slots, counts, strict=True) for _ in range(own)]
        positions = [slot.start + place for slot, own in zip(slots, counts, strict=True) for place in range(own)]
        numbers[0, :count] = np.concatenate([slot.token_ids for slot in slots])
        numbers[1, :count] = positions
        numbers[2, :count] = [
            slot.blocks[position // block_tokens] * block_tokens + position % block_tokens
            for slot, position in zip(owners, positions, strict=True)
        ]
        numbers[3, :count] = [
            max(position + 1, slot.rotary_length) for slot, position in zip(owners, positions, strict=True)
        ]
        numbers[4, :count] = [-1 if slot.drawn is None else slot.drawn for slot in owners]
        numbers[:5, count:] = [[0], [0], [spare_block * block_tokens], [1], [-1]]
        numbers[5, : len(kept)] = kept
        numbers[5, len(kept) :] = 0
        self._on_device.copy_(self._numbers, non_blocking=True)
        self._fill_blocks(slots, block_tokens, spare_block)
        if drawn is not None and any(slot.drawn is not None for slot in slots):
            feed(self._on_device[0], self._on_device[4], drawn)

    def _fill_blocks(self, slots: Sequence[Slot], block_tokens: int, spare_block: int) -> None:
        """Write the columns that differ from those of the last step, and copy the table's rows up to the last change."""
        known = self._known
        self._known = [()] * self.size  # all are unknown if an error keeps them from the device
        table = self._blocks.numpy()
        num_changed = first = 0
        for slot in slots:
            count = len(slot.token_ids)
            seen = [slot.blocks[: (slot.start + count - 1) // block_tokens + 1]] * count
            if known[first : first + count] != seen:
                known[first : first + count] = seen
                table[: len(seen[0]), first : first + count] = np.array(seen[0], np.int32)[:, None]
                num_changed = max(num_changed, len(seen[0]))
            first += count
        padding = [(spare_block,)] * (self.size - first)
        if known[first:] != padding:
            known[first:] = padding
            table[0, first:] = spare_block
            num_changed = max(num_changed, 1)
        if num_changed:
            self.blocks[:num_changed].copy_(self._blocks[:num_changed], non_blocking=True)
        self._known = known


def feed(token_ids: Tensor, places: Tensor, drawn: Tensor) -> None:
    """Replace the token ids (t,) that have a place (t,) among drawn tokens (n,); -1: the token id is known."""
    token_ids.copy_(torch.where(places < 0, token_ids, drawn[places.clamp(min=0)]))


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    answers: Answers


class DecodeGraphs:
    """The captured steps of one model."""

    def __init__(self, cache: PagedCache, forward: Forward, max_sequences: int, max_blocks: int) -> None:
        """Capture the steps. max_blocks is the most blocks of one sequence.

        A step has logits for at most max_sequences tokens. Raises CaptureRefusedError for a model that waits for the
        device, and any error of the library.
        """
        self._cache = cache
        self._max_sequences = max_sequences
        self._max_blocks = max_blocks
        self._captured: dict[int, _Captured] = {}
        self._copied = torch.cuda.Event()
        free_cached()
        capturer = Capturer(cache.device)
        size = 1 << (min(cache.num_blocks * cache.block_tokens, _LARGEST) - 1).bit_length()
        while size:  # largest first, so that the others can use the memory in its pool
            self._captured[size] = self._capture(forward, size, capturer)
            size //= 2

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens with a graph, largest first."""
        return list(self._captured)

    def run(self, slots: Sequence[Slot], drawn: Tensor | None = None) -> Answers | None:
        """Return the answers after the `kept_tokens` of each slot, or None if no graph fits.

        drawn as in `StepInputs.fill`. The next step overwrites the answers.
        """
        ends = np.cumsum([len(slot.token_ids) for slot in slots]) - 1
        captured = self._captured.get(1 << int(ends[-1]).bit_length())
        kept = kept_rows(slots, ends.tolist())
        if captured is None or len(kept) > len(captured.inputs.kept) or _num_seen(slots) > _MOST_SEEN:
            return None
        self._copied.synchronize()  # a moment: the step before the one under way, which they waited for, has been read
        captured.inputs.fill(slots, kept, self._cache.block_tokens, self._cache.num_blocks, drawn)
        self._copied.record()
        captured.graph.replay()
        logits, best = captured.answers
        return Answers(logits[: len(kept)], None if best is None else best[: len(kept)])

    def _capture(self, forward: Forward, size: int, capturer: Capturer) -> _Captured:
        from sie.workers.generation.kernels import Tables

        cache, device = self._cache, self._cache.device
        inputs = StepInputs(size, min(size, self._max_sequences), self._max_blocks, device)
        inputs.blocks[0] = cache.num_blocks
        inputs.numbers[2] = cache.num_blocks * cache.block_tokens
        token_ids, positions, rows, lengths = inputs.numbers
        cache.step = DecodeStep(rows, Tables(positions, inputs.blocks))

        def run() -> Answers:
            logits = forward(token_ids[None], positions[None], inputs.kept, lengths)
            return Answers(logits, likeliest(logits))

        try:
            graph, answers = capturer.capture(run)
        finally:
            cache.step = None
        return _Captured(graph, inputs, answers)


def _num_seen(slots: Sequence[Slot]) -> int:
    """Return how many rows of keys the tokens of prefill chunks read, each its own."""
    chunks = [(slot.start, len(slot.token_ids)) for slot in slots if len(slot.token_ids) > 1]
    return sum(length * (2 * start + length + 1) // 2 for start, length in chunks)


def try_capture(cache: PagedCache, forward: Forward, max_sequences: int, max_blocks: int) -> DecodeGraphs | None:
    """Return captured steps, or None if the model cannot be captured, for example if it waits during its step.

    Raises DeviceLostError.
    """
    try:
        with torch.inference_mode():
            return DecodeGraphs(cache, forward, max_sequences, max_blocks)
    except Exception as error:  # an unknown architecture may raise anything; steps run without a graph
        raise_if_lost(error)
        note("no_graphs", f"{type(error).__name__}: {error}")
        return None
