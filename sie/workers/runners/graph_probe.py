"""Captures the small steps of an encoder on a GPU at load, and proves that they give the same values and are faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from sie.workers.device.capture import CaptureRefusedError
from sie.workers.device.device import wait_later
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import raise_if_lost
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.runners.encode import Backbone, Execution
from sie.workers.runners.encoder_graphs import MAX_SEQUENCES, SIZES, EncoderGraphs
from sie.workers.runners.probe import MAX_DIFFERENCE, difference, probe_sequences

_TIMED_RUNS = 5

Measure = Callable[[Callable[[], object]], float]
"""Returns the seconds that a step takes, until the device has computed it."""


def capture_small_steps(backbone: Backbone, execution: Execution) -> None:
    """Let CUDA graphs run the small steps of a model that runs packed on a GPU, where that is faster.

    A model that cannot be captured has the fallback `no_graphs`. Raises DeviceLostError.
    """
    if backbone.device.type != "cuda" or not execution.packed:
        return
    try:
        with torch.inference_mode():
            backbone.graphs = capture(backbone, execution, partial(_least_s, backbone.device))
    except Exception as error:  # an unknown architecture may raise anything; its steps run without graphs
        raise_if_lost(error)
        note("no_graphs", f"{type(error).__name__}: {error}")


def capture(backbone: Backbone, execution: Execution, measure: Measure) -> EncoderGraphs | None:
    """Return the graphs that make steps faster, or None if none does.

    Raises CaptureRefusedError for a model that cannot be captured or gives other values then.
    """
    if backbone.rotates_by_length:
        raise CaptureRefusedError("a token's rotary factors depend on the length of its sequence")
    graphs = EncoderGraphs(
        backbone.run_row, backbone.device, position_offset=execution.position_offset, has_types=backbone.has_types
    )
    # The smallest step of a graph has the most padding.
    kept = {
        size for before, size in pairwise((0, *SIZES)) if _is_faster(backbone, execution, graphs, before + 1, measure)
    }
    graphs.keep(kept)
    return graphs if kept else None


def _is_faster(
    backbone: Backbone, execution: Execution, graphs: EncoderGraphs, num_tokens: int, measure: Measure
) -> bool:
    times: list[tuple[float, float]] = []
    for batch in _batches(backbone, num_tokens):
        if len(batch.order) > MAX_SEQUENCES:  # the model has few positions
            return False
        run = partial(graphs.run, batch)
        library = partial(backbone.run_packed, batch, execution.position_offset)
        found, expected = run(), library()[0]
        far = float("inf") if found is None else difference(found, expected)
        if not far < MAX_DIFFERENCE[expected.dtype]:
            raise CaptureRefusedError(f"captured steps of {num_tokens} tokens differ by {far:.2g}")
        times.append((measure(run), measure(library)))
    return all(captured_s < library_s for captured_s, library_s in times)


def _batches(backbone: Backbone, num_tokens: int) -> Iterator[PackedBatch]:
    """Yield a batch of this many tokens in a few sequences, and one with token types for a model that has some."""
    ids = np.resize(np.concatenate(probe_sequences(backbone)), num_tokens)
    cuts = sorted({1, num_tokens // 3, *range(0, num_tokens, backbone.max_positions or num_tokens)} - {0, num_tokens})
    yield pack_sequences(np.split(ids, cuts))
    if backbone.has_types:
        yield pack_sequences(np.split(ids, cuts), np.split(np.arange(num_tokens) % 2, cuts))


def _least_s(device: torch.device, run: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(_TIMED_RUNS):
        began_s = time.perf_counter()
        run()
        wait_later(device)()
        times.append(time.perf_counter() - began_s)
    return min(times)
