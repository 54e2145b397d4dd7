"""Counts and shows what concerns the server itself, not one of its processes, on a counter page of its own."""

from __future__ import annotations

import math

from sie.ipc import messages
from sie.metrics import definitions
from sie.shm.pages import CounterPage
from sie.supervisor.child import Child


class ServerPage:
    """The counter page that the supervisor writes and every frontend reads."""

    def __init__(self, page_bytes: int) -> None:
        self.page = CounterPage.create(page_bytes)
        self._expiring: set[str] = set()

    def count(self, family: definitions.Family, *labels: str) -> None:
        """Increment a counter."""
        self.page.counter(family.name, family.label_pairs(*labels)).add(1)

    def count_reload(self, *, is_refused: bool) -> None:
        """Count a reload of the settings by its outcome."""
        self.count(definitions.CONFIG_RELOADS, "refused" if is_refused else "applied")
        self.page.gauge(definitions.CONFIG_REFUSED.name, ()).set(float(is_refused))

    def show_keys(self, keys: messages.Keys) -> None:
        """Show the number of API keys, when they expire, and whether the latest key file was refused."""
        self.page.gauge(definitions.API_KEYS.name).set(len(keys.keys))
        self.page.gauge(definitions.API_KEYS_REFUSED.name).set(float(bool(keys.problem)))
        expiries = {key.name: key.expires_s for key in keys.keys if key.expires_s is not None}
        self._expiring |= expiries.keys()
        family = definitions.KEY_EXPIRY
        for name in self._expiring:  # a sample stays, so a key that is gone shows infinity
            self.page.gauge(family.name, family.label_pairs(name)).set(expiries.get(name, math.inf))

    def show_failed(self, model: str, *, has_failed: bool) -> None:
        """Show whether a model's load has failed."""
        family = definitions.MODEL_FAILED
        self.page.gauge(family.name, family.label_pairs(model)).set(float(has_failed))

    def create_restarts(self, worker: Child) -> None:
        """Create a worker's counter of restarts as 0: a scraper sees an increase only of a counter that it saw before."""
        family = definitions.WORKER_RESTARTS
        self.page.counter(family.name, family.label_pairs(str(worker.slot)))

    def show_worker(self, worker: Child) -> None:
        """Show whether a worker is ready, and whether its device is lost."""
        labels = definitions.WORKER_UP.label_pairs(str(worker.slot))
        self.page.gauge(definitions.WORKER_UP.name, labels).set(float(worker.state == "ready"))
        self.page.gauge(definitions.DEVICE_LOST.name, labels).set(float(worker.state == "lost"))
