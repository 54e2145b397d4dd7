"""Keeps the load of the last hour at a coarse step, so that a page opened now shows what was before it. Sends nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from sie.ipc.messages import HISTORY_POINTS, LoadPoint
from sie.metrics import definitions
from sie.shm.layout import ProtocolError
from sie.shm.pages import CounterPage, Record

STEP_S: Final = 15.0
"""Time between two points."""
_TEXT: Final = "generate"
"""The endpoint of generated text, whose latency is that of its length."""


class _Totals(msgspec.Struct):
    """Sums over all processes since the server's start; queued is of now."""

    requests: float = 0.0
    generated: float = 0.0
    queued: float = 0.0
    latencies: list[int] = msgspec.field(default_factory=lambda: [0] * (len(definitions.REQUEST_DURATION.bounds) + 1))


class LoadHistory:
    """The points of the last hour, oldest first. Its memory is bounded, whatever the server does."""

    def __init__(self) -> None:
        self._points: deque[LoadPoint] = deque(maxlen=HISTORY_POINTS)
        self._last: tuple[float, _Totals] | None = None

    @property
    def points(self) -> tuple[LoadPoint, ...]:
        """All points that are kept."""
        return tuple(self._points)

    def tick(self, now_s: float, pages: Iterable[CounterPage]) -> LoadPoint | None:
        """Add and return a point if one is due, else return None. now_s is monotonic; pages are those of all processes."""
        if self._last is not None and now_s - self._last[0] < STEP_S:
            return None
        try:
            totals = _sum([record for page in pages for record in page.records()])
        except (ProtocolError, KeyError, ValueError):  # a broken page; this point is left out, and the server goes on
            return None
        last, self._last = self._last, (now_s, totals)
        if last is None:
            return None
        self._points.append(point := _difference(last[1], totals, now_s - last[0]))
        return point


def _sum(records: Sequence[Record]) -> _Totals:
    totals = _Totals()
    for record in records:
        if record.name == definitions.REQUESTS.name:
            totals.requests += record.value
        elif record.name == definitions.GENERATED_TOKENS.name:
            totals.generated += record.value
        elif record.name == definitions.QUEUE_DEPTH.name and not math.isnan(record.value):
            totals.queued += record.value
        elif record.name == definitions.REQUEST_DURATION.name and _is_latency(dict(record.labels)):
            totals.latencies = [sum(pair) for pair in zip(totals.latencies, record.buckets, strict=True)]
    return totals


def _is_latency(labels: dict[str, str]) -> bool:
    return labels["phase"] == "total" and labels["endpoint"] != _TEXT


def _difference(old: _Totals, new: _Totals, elapsed_s: float) -> LoadPoint:
    counts = [count - before for count, before in zip(new.latencies, old.latencies, strict=True)]
    return LoadPoint(
        requests_per_s=round((new.requests - old.requests) / elapsed_s, 3),
        generated_per_s=round((new.generated - old.generated) / elapsed_s, 3),
        queued=new.queued,
        p50_s=quantile(counts, definitions.REQUEST_DURATION.bounds, 0.5),
        p95_s=quantile(counts, definitions.REQUEST_DURATION.bounds, 0.95),
    )


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return a quantile of counts by bucket, the last one +Inf, linear within a bucket; None without counts.

    Source: Prometheus' histogram_quantile.
    """
    goal, seen = share * sum(counts), 0
    if not goal:
        return None
    for count, low, high in zip(counts, (0.0, *bounds), bounds, strict=False):
        if seen + count >= goal:
            return low + (high - low) * (goal - seen) / count
        seen += count
    return bounds[-1]
