"""Counts durations by size with a fixed relative error, in memory that does not grow with time.

A duration is counted in one of 1,024 steps of its power of two, so a result is at most 0.1 % too large. This is the
layout of an HDR histogram with three digits. Source: hdrhistogram.org.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_STEP_BITS: Final = 10
_MAX_BITS: Final = 43  # over two hours in nanoseconds; a longer duration counts as this
_NUM_STEPS: Final = (_MAX_BITS - _STEP_BITS + 1) << _STEP_BITS
_FOLD_AT: Final = 1 << 16


class Histogram:
    """A distribution of durations in nanoseconds."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_NUM_STEPS, np.int64)
        self._recent: list[int] = []
        self._max_ns = 0

    def record(self, duration_ns: int) -> None:
        """Count a duration; one below zero counts as zero."""
        recent = self._recent
        recent.append(duration_ns)
        if len(recent) >= _FOLD_AT:
            self._fold()

    @property
    def count(self) -> int:
        """Number of counted durations."""
        return int(self._counts.sum()) + len(self._recent)

    @property
    def max_ns(self) -> int:
        """The exact longest duration; 0 without durations."""
        self._fold()
        return self._max_ns

    def percentiles_ms(self, percentiles: Sequence[float]) -> list[float]:
        """Return these percentiles of the durations in milliseconds; NaN without durations."""
        self._fold()
        total = int(self._counts.sum())
        if not total:
            return [float("nan")] * len(percentiles)
        ranks = np.maximum(1, np.ceil(np.asarray(percentiles) / 100 * total - 1e-9))
        steps = np.searchsorted(np.cumsum(self._counts), ranks)
        ends = [
            self._max_ns if rank >= total else _upper_end_ns(int(step)) for rank, step in zip(ranks, steps, strict=True)
        ]
        return [min(end, self._max_ns) / 1e6 for end in ends]

    def count_within(self, limit_ns: int) -> int:
        """Return how many durations were at most limit_ns, to a tenth of a percent of limit_ns."""
        self._fold()
        return int(self._counts[: int(_steps_of(np.array([limit_ns]))[0]) + 1].sum())

    def _fold(self) -> None:
        """Move recent durations into the counts; many at once cost a hundredth of single ones."""
        if self._recent:
            durations = np.maximum(np.array(self._recent, np.int64), 0)
            self._recent.clear()
            self._counts += np.bincount(_steps_of(durations), minlength=_NUM_STEPS)
            self._max_ns = max(self._max_ns, int(durations.max()))


def _steps_of(durations_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    capped = np.minimum(durations_ns, (1 << _MAX_BITS) - 1)
    num_bits = np.frexp(capped.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(0, num_bits - (_STEP_BITS + 1))
    return (shift << _STEP_BITS) + (capped >> shift)


def _upper_end_ns(step: int) -> int:
    shift = max(0, (step >> _STEP_BITS) - 1)
    return ((step - (shift << _STEP_BITS) + 1) << shift) - 1
