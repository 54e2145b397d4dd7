"""Records a frontend's generation metrics: token latencies and requests under way. Defines no families itself.

The families are in `sie.metrics.definitions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from sie.frontend.telemetry.metrics import UNKNOWN_MODEL
from sie.metrics import definitions
from sie.metrics.definitions import Family
from sie.shm.pages import CounterPage, Gauge, Histogram


class GenerationMetrics:
    """The generation metrics of one frontend process. known_models is queried once for each new label."""

    def __init__(self, page: CounterPage, known_models: Container[str]) -> None:
        self._page = page
        self._known_models = known_models
        self._histograms: dict[tuple[str, str], Histogram] = {}
        self._under_way: Counter[tuple[str, str, str]] = Counter()
        self._gauges: dict[tuple[str, str, str], Gauge] = {}

    def record_first_token(self, model: str, elapsed_s: float) -> None:
        """Observe the time from a request's submission to its first token."""
        self._histogram(definitions.FIRST_TOKEN, model).observe(elapsed_s)

    def record_next_token(self, model: str, gap_s: float) -> None:
        """Observe the time between two steps' tokens of one request."""
        self._histogram(definitions.TOKEN_GAP, model).observe(gap_s)

    def begin(self, method: str, path: str, model: str) -> None:
        """Count a request as under way, until `end`. path is a route's template; model must be a known one."""
        self._add((method, path, model), 1)

    def end(self, method: str, path: str, model: str) -> None:
        """Stop counting a request as under way."""
        self._add((method, path, model), -1)

    def _add(self, labels: tuple[str, str, str], change: int) -> None:
        gauge = self._gauges.get(labels)
        if gauge is None:
            family = definitions.HTTP_IN_FLIGHT
            gauge = self._gauges[labels] = self._page.gauge(family.name, family.label_pairs(*labels))
        self._under_way[labels] += change
        gauge.set(self._under_way[labels])

    def _histogram(self, family: Family, model: str) -> Histogram:
        histogram = self._histograms.get((family.name, model))
        if histogram is None:
            label = model if model in self._known_models else UNKNOWN_MODEL
            histogram = self._page.histogram(family.name, family.label_pairs(label), family.bounds)
            self._histograms[family.name, model] = histogram
        return histogram
