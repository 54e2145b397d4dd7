"""Hosts of models and adapters whose loads run when the test says so, on its own thread."""

from __future__ import annotations

import os
from typing import Any

from sie.workers.loading.adapters import AdapterHost
from sie.workers.loading.hosting import Host
from sie.workers.loading.load_queue import LoadQueue


class SteppedLoads(LoadQueue[Any]):
    """Loads that run when the test says so."""

    running: Any = None

    def _start_thread(self, load: Any) -> None:
        self.running = load

    @property
    def has_results(self) -> bool:
        return not self._results.empty()

    def end_load(self) -> None:
        """End the running load."""
        load, self.running = self.running, None
        self._load(load)


class SteppedHost(Host):
    """A worker's host whose loads run when the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loads = self._loads = step_loads(self)

    @property
    def has_work(self) -> bool:
        return self.loads.running is not None or self.loads.has_results or bool(self.unloading())

    def step(self) -> None:
        """End the running load, take what was staged, or free a model."""
        if self.loads.running is not None:
            self.loads.end_load()
        if self.loads.has_results:
            self.collect()
        for model in self.unloading()[:1]:
            self.finish_unload(model)


class SteppedAdapterHost(AdapterHost):
    """A worker's adapters, which are read when the test says so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.loads = self._loads = step_loads(self)


def step_loads(host: Any) -> SteppedLoads:
    """Return stepped loads in place of a host's own."""
    os.close(host.event_fd)
    own = host._loads
    loads = SteppedLoads(own._name, own._run, own._fail)
    host.event_fd = loads.event_fd
    return loads
