"""Owns recorded decode steps on a GPU: CUDA graphs of a step in which every sequence has one token.

Launching a model's kernels one by one takes longer than they run when sequences are few. All graphs are recorded at
load, for numbers of sequences that double; a step takes the next larger one and fills it up with sequences of one token
in the spare block, which nobody reads. Sampling stays outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sie.logs import get_logger
from sie.workers.generation.attention import PagedCache
from sie.workers.generation.layout import StepLayout
from sie.workers.generation.varlen import StepTables

_log = get_logger(__name__)
_LARGEST = 256
_WARM_UPS = 2
"""Runs before the recording, in which libraries choose their kernels and take their workspaces."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes token ids and positions (1, n) and the rows (n,) whose logits are wanted; returns (n, vocabulary)."""


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    token_ids: Tensor
    positions: Tensor
    tables: StepTables
    logits: Tensor


class DecodeGraphs:
    """The recorded steps of one model."""

    def __init__(self, cache: PagedCache, forward: Forward, max_sequences: int, max_blocks: int) -> None:
        """Record them. max_blocks is the most that one sequence has. Raises what the library raises."""
        self._cache = cache
        self._max_blocks = max_blocks
        self._recorded: dict[int, _Recorded] = {}
        pool = torch.cuda.graph_pool_handle()
        size = 1 << (min(max_sequences, _LARGEST) - 1).bit_length()
        while size:  # largest first, so that the others find their memory in its pool
            self._recorded[size] = self._record(forward, size, pool)
            size //= 2

    def run(self, layout: StepLayout) -> Tensor | None:
        """Return the logits (n, vocabulary) of a step's tokens, in the row's order, or None for one not recorded.

        They are overwritten by the next step.
        """
        count = len(layout.decodes)
        size = 1 << max(count - 1, 0).bit_length()
        if layout.prompts or size not in self._recorded:
            return None
        recorded = self._recorded[size]
        table = np.full((size, self._max_blocks), layout.spare_block, np.int32)
        for row, slot in zip(table, layout.decodes, strict=False):
            num_seen = slot.start // layout.block_tokens + 1
            row[:num_seen] = slot.blocks[:num_seen]
        tables = recorded.tables
        _fill(recorded.token_ids[0], layout.token_ids, 0)
        _fill(recorded.positions[0], layout.positions, 0)
        _fill(tables.rows, layout.rows, layout.spare_block * layout.block_tokens)
        _fill(tables.seen, layout.positions + 1, 1)
        tables.blocks.copy_(torch.from_numpy(table))
        recorded.graph.replay()
        return recorded.logits[:count]

    def _record(self, forward: Forward, size: int, pool: Any) -> _Recorded:
        cache, device = self._cache, self._cache.device
        spare = cache.num_blocks
        longest = self._max_blocks * cache.block_tokens
        tables = StepTables(
            rows=torch.full((size,), spare * cache.block_tokens, device=device),
            cu_queries=torch.arange(size + 1, dtype=torch.int32, device=device),
            cu_keys=torch.arange(size + 1, dtype=torch.int32, device=device) * longest,
            seen=torch.ones(size, dtype=torch.int32, device=device),
            blocks=torch.full((size, self._max_blocks), spare, dtype=torch.int32, device=device),
            longest_query=1,
            longest_key=longest,
        )
        token_ids = torch.zeros(1, size, dtype=torch.int64, device=device)
        positions = torch.zeros_like(token_ids)
        wanted = torch.arange(size, device=device)
        cache.step = tables
        try:
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    forward(token_ids, positions, wanted)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other models load meanwhile: only what this thread does may spoil the recording.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = forward(token_ids, positions, wanted)
        finally:
            cache.step = None
        return _Recorded(graph, token_ids, positions, tables, logits)


def _fill(target: Tensor, values: np.ndarray[tuple[int], np.dtype[np.int64]], filler: int) -> None:
    """Write values into the first places of a tensor and the filler into the others."""
    whole = np.full(len(target), filler, np.int64)
    whole[: len(values)] = values
    target.copy_(torch.from_numpy(whole))


def try_record(cache: PagedCache, forward: Forward, max_sequences: int, max_blocks: int) -> DecodeGraphs | None:
    """Return recorded steps, None for a model that cannot be recorded: it asks the device something on its way."""
    try:
        with torch.inference_mode():
            return DecodeGraphs(cache, forward, max_sequences, max_blocks)
    except Exception as error:  # whatever a foreign architecture raises, steps run without
        _log.warning("decode steps are not recorded: %s: %s", type(error).__name__, error)
        return None
