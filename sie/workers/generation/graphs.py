"""Records decode steps on a GPU as CUDA graphs: steps in which every sequence has one token.

Launching a model's kernels one by one takes longer than they run when sequences are few. All graphs are recorded at
load, for numbers of sequences that double; a step takes the next larger one and fills it up with sequences of one token
in the spare block, which nobody reads. The likeliest token of each sequence is part of the recording, so that a greedy step
is two copies in, one launch and one copy out; any other sampling stays outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sie.runtime.logs import get_logger
from sie.workers.generation.paged_cache import PagedCache
from sie.workers.generation.sampling import likeliest
from sie.workers.generation.varlen import DecodeStep, fill_blocks
from sie.workers.model_api import Slot

_log = get_logger(__name__)
_LARGEST = 256
_WARM_UPS = 2
"""Runs before the recording, in which kernels are compiled and chosen and libraries take their workspaces."""

Forward = Callable[[Tensor, Tensor, None, Tensor], Tensor]
"""Takes token ids and positions (1, n), None, all rows being wanted, and rotary lengths (n,); returns (n, vocabulary)."""


class Answers(NamedTuple):
    """Logits (n, vocabulary) behind n tokens; best (n,) as `likeliest` gives it, None where nobody has looked yet."""

    logits: Tensor
    best: Tensor | None = None


class StepInputs:
    """What a step of up to `size` sequences reads on the device, and the page-locked memory it is copied from."""

    def __init__(self, size: int, max_blocks: int, device: torch.device) -> None:
        """Make room for sequences of up to max_blocks blocks."""
        is_locked = device.type == "cuda"
        self.size = size
        self._numbers = torch.zeros(4, size, dtype=torch.int64, pin_memory=is_locked)
        self._blocks = torch.zeros(max_blocks, size, dtype=torch.int32, pin_memory=is_locked)
        self.numbers = torch.zeros(4, size, dtype=torch.int64, device=device)
        """Token ids, positions, the rows that keep them, and their rotary lengths (`Slot`)."""
        self.blocks = torch.zeros(max_blocks, size, dtype=torch.int32, device=device)
        """As in `kernels.Tables`."""

    def fill(self, slots: Sequence[Slot], block_tokens: int, spare_block: int) -> None:
        """Write the slots' values, one token each, and those of fillers, in the order of the stream.

        The last copies must be over: whoever has read a step's result knows that they are.
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
        numbers[:, count:] = [[0], [0], [spare_block * block_tokens], [1]]
        fill_blocks(blocks, slots, block_tokens)
        blocks[0, count:] = spare_block
        num_seen = max(starts) // block_tokens + 1  # no more of a table that may hold a very long context
        self.numbers.copy_(self._numbers, non_blocking=True)
        self.blocks[:num_seen].copy_(self._blocks[:num_seen], non_blocking=True)


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    answers: Answers


class DecodeGraphs:
    """The recorded steps of one model."""

    def __init__(self, cache: PagedCache, forward: Forward, max_sequences: int, max_blocks: int) -> None:
        """Record them. max_blocks is the most that one sequence has. Raises what the library raises."""
        self._cache = cache
        self._max_blocks = max_blocks
        self._recorded: dict[int, _Recorded] = {}
        self._copied = torch.cuda.Event()
        pool = torch.cuda.graph_pool_handle()
        size = 1 << (min(max_sequences, _LARGEST) - 1).bit_length()
        while size:  # largest first, so that the others find their memory in its pool
            self._recorded[size] = self._record(forward, size, pool)
            size //= 2

    def run(self, slots: Sequence[Slot]) -> Answers | None:
        """Return the answers to a step of slots with one token each, in their order, or None for one not recorded.

        They are overwritten by the next step.
        """
        count = len(slots)
        recorded = self._recorded.get(1 << max(count - 1, 0).bit_length())
        if recorded is None or any(len(slot.token_ids) > 1 for slot in slots):
            return None
        self._copied.synchronize()
        recorded.inputs.fill(slots, self._cache.block_tokens, self._cache.num_blocks)
        self._copied.record()
        recorded.graph.replay()
        answers = recorded.answers
        return Answers(answers.logits[:count], None if answers.best is None else answers.best[:count])

    def _record(self, forward: Forward, size: int, pool: Any) -> _Recorded:
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
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other models load meanwhile: only what this thread does may spoil the recording.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                answers = run()
        finally:
            cache.step = None
        return _Recorded(graph, inputs, answers)


def try_record(cache: PagedCache, forward: Forward, max_sequences: int, max_blocks: int) -> DecodeGraphs | None:
    """Return recorded steps, None for a model that cannot be recorded: it asks the device something on its way."""
    try:
        with torch.inference_mode():
            return DecodeGraphs(cache, forward, max_sequences, max_blocks)
    except Exception as error:  # whatever a foreign architecture raises, steps run without
        _log.warning("decode steps are not recorded: %s: %s", type(error).__name__, error)
        return None
