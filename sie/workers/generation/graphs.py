"""Captures decode steps on a GPU as CUDA graphs: steps in which every sequence has one token.

When sequences are few, launching a model's kernels one by one takes longer than running them. All graphs are captured
at load, for sequence counts that are powers of two. A step takes the next larger graph and pads it with sequences of
one token in the spare block, which nobody reads. The graph includes each sequence's likeliest token. So a greedy step
is two copies in, one launch and one copy out. All other sampling runs outside the graph. A step that begins before the
one before has been read takes tokens from that step's result on the device (`feed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sie.workers.device.capture import Capturer
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import raise_if_lost
from sie.workers.device.memory import free_cached
from sie.workers.generation.paged_cache import PagedCache
from sie.workers.generation.sampling import likeliest
from sie.workers.generation.varlen import DecodeStep, fill_blocks
from sie.workers.model_api import Slot

_LARGEST = 256

Forward = Callable[[Tensor, Tensor, None, Tensor], Tensor]
"""Takes token ids and positions (1, n), None (all rows are kept) and rotary lengths (n,); returns (n, vocabulary)."""


class Answers(NamedTuple):
    """Logits (n, vocabulary) after n tokens; best (n,) is the result of `likeliest`, None if not computed yet."""

    logits: Tensor
    best: Tensor | None = None


class StepInputs:
    """The device inputs of a step of up to `size` sequences, and the page-locked memory to copy them from."""

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        """Allocate room for sequences of up to max_blocks blocks."""
        is_locked = device.type == "cuda"
        self.size = size
        self._numbers = torch.zeros(5, size, dtype=torch.int64, pin_memory=is_locked)
        self._blocks = torch.zeros(max_blocks, size, dtype=torch.int32, pin_memory=is_locked)
        self._on_device = torch.zeros(5, size, dtype=torch.int64, device=device)
        self.numbers = self._on_device[:4]
        """Token ids, positions, their rows in the key/value cache, and their rotary lengths (`Slot`)."""
        self.blocks = torch.zeros(max_blocks, size, dtype=torch.int32, device=device)
        """As in `kernels.Tables`."""

    def fill(self, slots: Sequence[Slot], block_tokens: int, spare_block: int, drawn: Tensor | None = None) -> None:
        """Write the slots' values, one token each, and the padding, in the order of the stream.

        drawn (n,) int64 are the tokens that the draws of the step before chose, for `Slot.drawn`. The copies of the
        previous call must have finished.
        """
        numbers, blocks = self._numbers.numpy(), self._blocks.numpy()
        count = len(slots)
        starts = [slot.start for slot in slots]
        numbers[0, :count] = [slot.token_ids[0] for slot in slots]
        numbers[1, :count] = starts
        numbers[2, :count] = [
            slot.blocks[slot.start // block_tokens] * block_tokens + slot.start % block_tokens for slot in slots
        ]
        numbers[3, :count] = [max(slot.start + 1, slot.rotary_length) for slot in slots]
        numbers[4, :count] = [-1 if slot.drawn is None else slot.drawn for slot in slots]
        numbers[:, count:] = [[0], [0], [spare_block * block_tokens], [1], [-1]]
        fill_blocks(blocks, slots, block_tokens)
        blocks[0, count:] = spare_block
        num_seen = max(starts) // block_tokens + 1  # copy only this much of a table that may hold a very long context
        self._on_device.copy_(self._numbers, non_blocking=True)
        self.blocks[:num_seen].copy_(self._blocks[:num_seen], non_blocking=True)
        if drawn is not None and any(slot.drawn is not None for slot in slots):
            feed(self._on_device[0], self._on_device[4], drawn)


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

        Raises CaptureRefusedError for a model that waits for the device, and any error of the library.
        """
        self._cache = cache
        self._max_blocks = max_blocks
        self._captured: dict[int, _Captured] = {}
        self._copied = torch.cuda.Event()
        free_cached()
        capturer = Capturer(cache.device)
        size = 1 << (min(max_sequences, cache.num_blocks, _LARGEST) - 1).bit_length()  # each sequence has a block
        while size:  # largest first, so that the others can use the memory in its pool
            self._captured[size] = self._capture(forward, size, capturer)
            size //= 2

    @property
    def sizes(self) -> list[int]:
        """The numbers of sequences with a graph, largest first."""
        return list(self._captured)

    def run(self, slots: Sequence[Slot], drawn: Tensor | None = None) -> Answers | None:
        """Return the answers to a step of slots with one token each, in their order, or None if no graph fits.

        drawn as in `StepInputs.fill`. The next step overwrites the answers.
        """
        count = len(slots)
        captured = self._captured.get(1 << max(count - 1, 0).bit_length())
        if captured is None or any(len(slot.token_ids) > 1 for slot in slots):
            return None
        self._copied.synchronize()  # a moment: the step before the one under way, which they waited for, has been read
        captured.inputs.fill(slots, self._cache.block_tokens, self._cache.num_blocks, drawn)
        self._copied.record()
        captured.graph.replay()
        answers = captured.answers
        return Answers(answers.logits[:count], None if answers.best is None else answers.best[:count])

    def _capture(self, forward: Forward, size: int, capturer: Capturer) -> _Captured:
        from sie.workers.generation.kernels import Tables

        cache, device = self._cache, self._cache.device
        inputs = StepInputs(size, self._max_blocks, device)
        inputs.blocks[0] = cache.num_blocks
        inputs.numbers[2] = cache.num_blocks * cache.block_tokens
        token_ids, positions, rows, lengths = inputs.numbers
        cache.step = DecodeStep(rows, Tables(positions, inputs.blocks))

        def run() -> Answers:
            logits = forward(token_ids[None], positions[None], None, lengths)
            return Answers(logits, likeliest(logits))

        try:
            graph, answers = capturer.capture(run)
        finally:
            cache.step = None
        return _Captured(graph, inputs, answers)


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
