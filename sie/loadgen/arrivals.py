"""Plans when the requests of an open loop are due, and searches for the highest rate that a server holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.loadgen.runs import Run

_MIN_SHARE = 0.97
"""A run holds the planned rate only if its answers reach at least this share of it."""
_GROWTH = 1.25
_NUM_HALVINGS = 3


def plan_arrivals(rate: float, duration_s: float, *, poisson: bool) -> NDArray[np.int64]:
    """Return (n,) nanoseconds from the start, ascending, at which requests are due. Deterministic."""
    count = max(1, round(rate * duration_s))
    gaps_ns = np.full(count, 1e9 / rate)
    if poisson:
        gaps_ns *= np.random.default_rng(count).exponential(size=count)
    return gaps_ns.cumsum().astype(np.int64)


class Trial(NamedTuple):
    """One tried rate."""

    rate: float
    run: Run
    held: bool


def find_max_rate(run_at: Callable[[float], Run], limit_ms: float, start_rate: float) -> list[Trial]:
    """Raise the rate until it does not hold, then search the limit by halving; return every trial in order.

    A rate holds when its p99 is at most limit_ms, no request failed, and the answers kept up with the plan.
    """
    trials: list[Trial] = []

    def holds(rate: float) -> bool:
        run = run_at(rate)
        held = run.num_errors == 0 and run.latency_ms(99)[0] <= limit_ms and run.rate >= _MIN_SHARE * rate
        trials.append(Trial(rate, run, held))
        return held

    low, high = 0.0, start_rate
    while holds(high):
        low, high = high, high * _GROWTH
    while not low:
        high /= _GROWTH
        if holds(high):
            low, high = high, high * _GROWTH
        elif high < 1:
            return trials
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return trials


def best_trial(trials: list[Trial]) -> Trial | None:
    """Return the trial with the highest rate that held, or None."""
    return max((trial for trial in trials if trial.held), key=lambda trial: trial.rate, default=None)
