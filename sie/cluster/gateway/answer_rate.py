"""Measures how fast pools answer this gateway, and says from it when a refused client should come back. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

_SMOOTHING_S: Final = 5.0
_FIRST_S: Final = 1.0
"""The first answers count as those of a whole second, or two at once would be an endless rate."""
_UNKNOWN_S: Final = 5
_MOST_S: Final = 60


class AnswerRate:
    """The answers of one pool, as a sum that decays with time. The clock is passed in, in seconds."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._began_s = self._seen_s = now_s()
        self._sum = 0.0

    def count(self) -> None:
        """Count an answered item."""
        self._decay()
        self._sum += 1.0

    def per_s(self) -> float:
        """Return the answers a second; 0 if there was none."""
        self._decay()
        age_s = max(_FIRST_S, self._seen_s - self._began_s)
        return self._sum / (_SMOOTHING_S * (1.0 - math.exp(-age_s / _SMOOTHING_S)))

    def _decay(self) -> None:
        now_s = self._now_s()
        self._sum *= math.exp(-(now_s - self._seen_s) / _SMOOTHING_S)
        self._seen_s = now_s


def retry_after_s(num_waiting: int, per_s: float) -> int:
    """Return the whole seconds until this many items are answered, from 1 to 60; a guess while nothing was answered."""
    if per_s <= 0:
        return _UNKNOWN_S
    return max(1, math.ceil(min(num_waiting / per_s, _MOST_S)))
