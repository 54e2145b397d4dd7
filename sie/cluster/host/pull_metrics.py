"""Counts the work that a host takes from NATS."""

from __future__ import annotations

from collections.abc import Callable, Container

from sie.frontend.telemetry.metrics import UNKNOWN_MODEL
from sie.metrics import cluster_definitions as families
from sie.metrics.family import Family
from sie.shm.pages import CounterPage, Gauge


class PullMetrics:
    """The counters of one puller; page is its own, and known_models may be a live view."""

    def __init__(self, page: CounterPage, known_models: Container[str]) -> None:
        self._page = page
        self._known_models = known_models
        self._running = self._gauge(families.WORKER_ITEMS_RUNNING)
        self._texts = self._gauge(families.WORKER_TEXTS_RUNNING)
        self._connected = self._gauge(families.WORKER_CONNECTED)
        self._refused = self._gauge(families.WORKER_CONFIGS_REFUSED)
        self._room = self._gauge(families.PULL_ROOM)
        self._asked = self._gauge(families.PULL_ASKED)
        self._duration = page.histogram(families.PULL_DURATION.name, (), families.PULL_DURATION.bounds)
        self._items: dict[tuple[str, str], Callable[[float], None]] = {}

    def _gauge(self, family: Family) -> Gauge:
        return self._page.gauge(family.name, ())

    def record_item(self, model: str, outcome: str) -> None:
        """Count a work item by its outcome: answered, failed, returned or expired."""
        add = self._items.get((model, outcome))
        if add is None:
            label = model if model in self._known_models else UNKNOWN_MODEL
            family = families.WORKER_ITEMS
            add = self._page.counter(family.name, family.label_pairs(label, outcome)).add
            if label == model:
                self._items[model, outcome] = add
        add(1.0)

    def show_turn(self, duration_s: float, room: int, num_asked: int, num_running: int) -> None:
        """Publish one turn of the loop that asks for work."""
        self._duration.observe(duration_s)
        self._room.set(room)
        self._asked.set(num_asked)
        self._running.set(num_running)

    def show_state(self, *, num_texts: int, num_refused: int, is_connected: bool) -> None:
        """Publish the state of the host's part in the cluster."""
        self._texts.set(num_texts)
        self._refused.set(num_refused)
        self._connected.set(float(is_connected))
