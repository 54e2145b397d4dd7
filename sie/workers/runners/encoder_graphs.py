"""Captures an encoder's small packed steps on a GPU as CUDA graphs, one for each of a few numbers of tokens.

Launching the kernels of a small step one by one takes longer than running them. A step takes the next larger graph. It is
filled up with one more sequence, which nobody reads, and with sequences without tokens. `graph_probe` proves the graphs
and keeps those that make steps faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sie.workers.device.capture import Capturer
from sie.workers.packed.attention import Boundaries, packed_step
from sie.workers.packed.batch import PackedBatch

SIZES: Final = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sizes of the graphs, in tokens. A step runs in the next larger one: above 16 tokens, less than half of that is padding. Steps
above the largest size need no graph, because they keep a GPU busy while the next kernel is launched."""
MAX_SEQUENCES: Final = 32

Forward = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Takes token ids and positions (1, t), and token types (1, t) if the model has some; returns hidden states (1, t, d)."""


class StepInputs:
    """The device inputs of steps of one size, and the page-locked memory to copy them from."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Begin with one sequence of all tokens."""
        is_locked = device.type == "cuda"
        self._numbers = torch.zeros(3, size, dtype=torch.int64, pin_memory=is_locked)
        self._bounds = torch.full((MAX_SEQUENCES + 2,), size, dtype=torch.int32, pin_memory=is_locked)
        self._bounds[0] = 0
        self.numbers = self._numbers.to(device, copy=True)
        """Token ids, positions and token types."""
        self.bounds = self._bounds.to(device, copy=True)
        """As `PackedBatch.cu_seqlens`."""

    def fill(self, batch: PackedBatch, position_offset: int) -> None:
        """Write a batch, in the order of the stream. The copies of the previous call must have finished."""
        numbers, bounds = self._numbers.numpy(), self._bounds.numpy()
        count, num_bounds = len(batch.input_ids), len(batch.cu_seqlens)
        numbers[0, :count], numbers[0, count:] = batch.input_ids, batch.input_ids[0]
        numbers[1, :count], numbers[1, count:] = batch.position_ids, 0
        numbers[1] += position_offset
        numbers[2] = 0
        if batch.token_types is not None:
            numbers[2, :count] = batch.token_types
        bounds[:num_bounds] = batch.cu_seqlens
        bounds[num_bounds:] = numbers.shape[1]
        self.numbers.copy_(self._numbers, non_blocking=True)
        self.bounds.copy_(self._bounds, non_blocking=True)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: StepInputs
    hidden: Tensor


class EncoderGraphs:
    """The captured steps of one encoder. Used by one thread at a time."""

    def __init__(self, forward: Forward, device: torch.device, *, position_offset: int, has_types: bool) -> None:
        """Capture the steps. has_types: the model takes token types, which are 0 for a batch without them.

        Raises CaptureRefusedError for a model that waits for the device, and any error of the library.
        """
        self._position_offset = position_offset
        self._has_types = has_types
        self._copied = torch.cuda.Event()
        capturer = Capturer(device)
        # Largest first, so that the others can use the memory in its pool.
        self._captured = {size: self._capture(forward, size, device, capturer) for size in reversed(SIZES)}
        self._all = tuple(self._captured.values())  # also the unused ones, as `Capturer` requires

    @property
    def sizes(self) -> list[int]:
        """The numbers of tokens with a graph, largest first."""
        return list(self._captured)

    def keep(self, sizes: Container[int]) -> None:
        """Use the graphs of no other sizes."""
        self._captured = {size: captured for size, captured in self._captured.items() if size in sizes}

    def run(self, batch: PackedBatch) -> Tensor | None:
        """Return hidden states (t, d) in the batch's order, or None if no graph fits."""
        count, num_sequences = len(batch.input_ids), len(batch.cu_seqlens) - 1
        place = bisect_left(SIZES, count)
        captured = self._captured.get(SIZES[place]) if place < len(SIZES) else None
        is_other = batch.attended is not None or (batch.token_types is not None and not self._has_types)
        if captured is None or num_sequences > MAX_SEQUENCES or is_other:
            return None
        self._copied.synchronize()  # short: the step that those copies waited for has been read
        captured.inputs.fill(batch, self._position_offset)
        self._copied.record()
        captured.graph.replay()
        return captured.hidden[:count].clone()  # the next step overwrites them

    def _capture(self, forward: Forward, size: int, device: torch.device, capturer: Capturer) -> _Captured:
        inputs = StepInputs(size, device)
        inputs.numbers[1] += self._position_offset
        token_ids, positions, types = (numbers[None] for numbers in inputs.numbers)

        def run() -> Tensor:
            with packed_step(Boundaries(inputs.bounds, (), size)):
                return forward(token_ids, positions, types if self._has_types else None)[0]

        graph, hidden = capturer.capture(run)
        return _Captured(graph, inputs, hidden)
