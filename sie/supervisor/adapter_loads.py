"""Carries out what the adapter book decides: fetches, loads and unloads adapters where their model is loaded."""

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
from sie.supervisor.adapters import AdapterBook, AdapterRecord
from sie.supervisor.card_helper import Preparer
from sie.supervisor.children import Child
from sie.supervisor.crew import Crew
from sie.values.card import AdapterSpec
from sie.values.errors import WireError

_log = get_logger(__name__)
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class AdapterLoads:
    """The adapters of one server, as messages to its children."""

    def __init__(self, settings: Settings, specs: list[AdapterSpec], progress: Progress, spawn: Spawn) -> None:
        self._book = AdapterBook(specs, settings.models.max_loras, settings.models.load_retry_s)
        self._timeout_s = settings.models.load_timeout_s
        self._preparer = Preparer(settings, progress)
        self._spawn = spawn
        self._places: dict[str, set[int]] = {}
        """The workers that have each model."""

    def bind(self, crew: Crew, broadcast: Callable[[], None]) -> None:
        """Say whom to tell; broadcast sends the state of all models to all frontends."""
        self._crew = crew
        self._broadcast = broadcast

    def entries(self, models: tuple[ModelEntry, ...]) -> tuple[ModelEntry, ...]:
        """Return the models with their adapters, as frontends see them."""
        adapters = [self._book.entries(entry.card.id) for entry in models]
        return tuple(
            msgspec.structs.replace(entry, adapters=own) if own else entry
            for entry, own in zip(models, adapters, strict=True)
        )

    def want(self, model: str, adapter: str) -> None:
        """Start a load that a request asked for, if it is time for one."""
        record = self._book.want(model, adapter, time.monotonic())
        if record is None:
            return
        if record.is_on_disk:
            self._load(record)
        elif not record.preparing:
            record.preparing = True
            self._spawn(self._prepare(record))
        self._broadcast()

    def touch(self, used: tuple[tuple[str, str], ...]) -> None:
        """Note which adapters are in use."""
        self._book.touch(used)

    def report(self, worker: Child, report: messages.AdapterReport) -> None:
        """Take a worker's word on one of its adapters."""
        if report.state == "failed" and report.error is not None:
            _log.error("%s", report.error.message)
        elif report.state == "loaded":
            _log.info("adapter %s of %s loaded: %s", report.adapter, report.model, worker.place.device)
        for record in self._book.report(worker.slot, report, time.monotonic()):
            _log.info("adapter %s of %s is unloaded", record.spec.id, report.model)
            self._crew.send_all(self._crew.workers, messages.UnloadAdapter(report.model, record.spec.id))
        self._broadcast()

    def on_model(self, worker: Child, report: messages.ModelReport) -> None:
        """Follow a model: its adapters are loaded behind it, and end with it."""
        places = self._places.setdefault(report.model, set())
        if report.state == "loaded":
            places.add(worker.slot)
            for record in self._book.wanted_of(report.model):
                if record.is_on_disk:
                    self._crew.send(worker, _load_message(record))
            return
        was_here = worker.slot in places
        places.discard(worker.slot)
        is_kept = bool(places) or report.state != "available"  # one that is unloading may yet stay
        if was_here or not is_kept:
            self._book.forget(worker.slot, report.model, time.monotonic(), is_kept=is_kept)

    def forget_worker(self, slot: int) -> None:
        """Drop what a dead worker had; its successor gets it again, behind the model."""
        for places in self._places.values():
            places.discard(slot)
        self._book.forget(slot, None, time.monotonic(), is_kept=True)

    def tick(self, now_s: float) -> None:
        """Give up the loads that take too long."""
        hosted = {model for model, places in self._places.items() if places}
        late = self._book.overdue(self._timeout_s, now_s, hosted)
        for record in late:
            _log.error("%s", record.error.message if record.error is not None else "")
        if late:
            self._broadcast()

    def _load(self, record: AdapterRecord) -> None:
        for slot in self._places.get(record.spec.model, ()):
            self._crew.send(self._crew.workers[slot], _load_message(record))

    async def _prepare(self, record: AdapterRecord) -> None:
        fetched = await self._preparer.fetch_adapter(record.spec)
        record.preparing = False
        if isinstance(fetched, WireError):
            _log.error("%s", fetched.message)
            self._book.fail(record, fetched, time.monotonic())
        else:
            record.directory = fetched
            if record.wanted:
                self._load(record)
        self._broadcast()


def _load_message(record: AdapterRecord) -> messages.LoadAdapter:
    return messages.LoadAdapter(msgspec.structs.replace(record.spec, directory=record.directory or None))
