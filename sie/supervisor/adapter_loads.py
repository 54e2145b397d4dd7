"""Applies the decisions of the adapter registry: fetches, loads and unloads adapters. Decides nothing itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from sie.config.settings import Settings
from sie.ipc import messages
from sie.ipc.messages import ModelEntry
from sie.runtime.logs import get_logger
from sie.runtime.progress import Progress
from sie.supervisor.adapter_registry import AdapterRecord, AdapterRegistry
from sie.supervisor.card_helper import Preparer
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.values.card import AdapterSpec
from sie.values.errors import WireError

_log = get_logger(__name__)
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class AdapterLoads:
    """Sends adapter loads and unloads to the workers of one server."""

    def __init__(
        self,
        settings: Settings,
        specs: list[AdapterSpec],
        children: Children,
        broadcast: Callable[[], None],
        *,
        progress: Progress,
        spawn: Spawn,
    ) -> None:
        """Call `broadcast`, which sends the state of all models to all frontends, after each change."""
        self._children = children
        self._broadcast = broadcast
        self._registry = AdapterRegistry(specs, settings.models.max_loras, settings.models.load_retry_s)
        self._timeout_s = settings.models.load_timeout_s
        self._preparer = Preparer(settings, progress)
        self._spawn = spawn
        self._places: dict[str, set[int]] = {}
        """The slots of the workers that have each model."""

    def reconfigure(self, settings: Settings) -> None:
        """Apply reloaded settings. Running cool-downs stay as they are."""
        self._timeout_s = settings.models.load_timeout_s
        self._registry.set_retry(settings.models.load_retry_s)
        self._preparer.reconfigure(settings)

    def entries(self, models: tuple[ModelEntry, ...]) -> tuple[ModelEntry, ...]:
        """Return the model entries with their adapters, for frontends."""
        adapters = [self._registry.entries(entry.card.id) for entry in models]
        return tuple(
            msgspec.structs.replace(entry, adapters=own) if own else entry
            for entry, own in zip(models, adapters, strict=True)
        )

    def want(self, model: str, adapter: str) -> None:
        """Start a load for a request, unless one runs or its cool-down has not ended."""
        record = self._registry.want(model, adapter, time.monotonic())
        if record is None:
            return
        if record.is_on_disk:
            self._load(record)
        elif not record.preparing:
            record.preparing = True
            self._spawn(self._prepare(record))
        self._broadcast()

    def touch(self, used: tuple[tuple[str, str], ...]) -> None:
        """Mark these adapters as just used."""
        self._registry.touch(used)

    def report(self, worker: Child, report: messages.AdapterReport) -> None:
        """Record a worker's report on one of its adapters."""
        if report.state == "failed" and report.error is not None:
            _log.error("%s", report.error.message)
        elif report.state == "loaded":
            _log.info("adapter %s of %s loaded: %s", report.adapter, report.model, worker.place.device)
        for record in self._registry.report(worker.slot, report, time.monotonic()):
            _log.info("adapter %s of %s is unloaded", record.spec.id, report.model)
            self._children.send_all(self._children.workers, messages.UnloadAdapter(report.model, record.spec.id))
        self._broadcast()

    def on_model(self, worker: Child, report: messages.ModelReport) -> None:
        """Follow a model's state: load its adapters after it, and drop them with it."""
        places = self._places.setdefault(report.model, set())
        if report.state == "loaded":
            places.add(worker.slot)
            for record in self._registry.wanted_of(report.model):
                if record.is_on_disk:
                    self._children.send(worker, _load_message(record))
            return
        was_here = worker.slot in places
        places.discard(worker.slot)
        is_kept = bool(places) or report.state != "available"  # an unloading model may still stay
        if was_here or not is_kept:
            self._registry.forget(worker.slot, report.model, time.monotonic(), is_kept=is_kept)

    def forget_worker(self, slot: int) -> None:
        """Forget the adapters of a dead worker. Its successor loads them again after their model."""
        for places in self._places.values():
            places.discard(slot)
        self._registry.forget(slot, None, time.monotonic(), is_kept=True)

    def tick(self, now_s: float) -> None:
        """Fail the loads that exceed load_timeout_s."""
        hosted = {model for model, places in self._places.items() if places}
        late = self._registry.overdue(self._timeout_s, now_s, hosted)
        for record in late:
            _log.error("%s", record.error.message if record.error is not None else "")
        if late:
            self._broadcast()

    def _load(self, record: AdapterRecord) -> None:
        for slot in self._places.get(record.spec.model, ()):
            self._children.send(self._children.workers[slot], _load_message(record))

    async def _prepare(self, record: AdapterRecord) -> None:
        fetched = await self._preparer.fetch_adapter(record.spec)
        record.preparing = False
        if isinstance(fetched, WireError):
            _log.error("%s", fetched.message)
            self._registry.fail(record, fetched, time.monotonic())
        else:
            record.directory = fetched
            if record.wanted:
                self._load(record)
        self._broadcast()


def _load_message(record: AdapterRecord) -> messages.LoadAdapter:
    return messages.LoadAdapter(msgspec.structs.replace(record.spec, directory=record.directory or None))
