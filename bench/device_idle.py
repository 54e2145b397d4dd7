"""Measures the share of time in which a device does nothing, from the profiler's record of its kernels and copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def idle_share(run: Callable[[], object], device: str) -> float | None:
    """Return which part of the time from a run's first activity on the device to its last one has none: 0 to 1.

    On a CPU, torch's operations count as activity. The profiler makes launches slower, so this is an upper bound. Returns
    None if the profiler sees no activity: some hosts do not allow it to read a GPU's.
    """
    from torch.profiler import ProfilerActivity, profile

    is_cpu = device == "cpu"
    with profile(activities=[ProfilerActivity.CPU if is_cpu else ProfilerActivity.CUDA]) as record:
        run()
    kind = "CPU" if is_cpu else "CUDA"
    events: Any = record.events() or ()
    return idle_between(
        (event.time_range.start, event.time_range.end) for event in events if event.device_type.name == kind
    )


def idle_between(spans: Iterable[tuple[float, float]]) -> float | None:
    """Return the part of the time between the first start and the last end that no span covers; None without spans."""
    ordered = sorted(spans)
    if not ordered:
        return None
    first = reached = ordered[0][0]
    idle = 0.0
    for start, end in ordered:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / (reached - first) if reached > first else None
