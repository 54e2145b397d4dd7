"""Carries out what the model book decides: prepares, loads and unloads models, and keeps every frontend informed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from sie import control
from sie.catalog.spec import ModelSpec
from sie.errors import WireError
from sie.progress import Progress
from sie.settings import Settings
from sie.supervisor.children import Child
from sie.supervisor.crew import Crew
from sie.supervisor.models import ModelBook, Record
from sie.supervisor.prepare import Preparer, failed
from sie.types import ModelCard

Models = list[tuple[ModelSpec, bool, ModelCard | None]]
"""Of each model its spec, whether it is loaded at the start, and its card if that is known."""
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Loads:
    """The models of one server, as messages to its children."""

    def __init__(self, settings: Settings, book: ModelBook, progress: Progress, spawn: Spawn) -> None:
        self._idle_s = settings.models.idle_unload_s
        self._timeout_s = settings.models.load_timeout_s
        self._book = book
        self._progress = progress
        self._preparer = Preparer(settings, progress)
        self._spawn = spawn
        self._is_broadcast_due = False
        self._not_ready_reason: Callable[[], str] = str
        self.was_ready = False
        """Whether everything was ready at least once."""
        self.config_error = ""
        """Why the latest reload of the settings changed nothing; every frontend hears it."""

    def bind(self, crew: Crew, not_ready_reason: Callable[[], str], on_first_ready: Callable[[], None]) -> None:
        """Say whom to tell, and why the server would not be ready apart from its models."""
        self._crew = crew
        self._not_ready_reason = not_ready_reason
        self._on_first_ready = on_first_ready

    def start(self) -> None:
        """Begin with the models that readiness waits for."""
        for record in self._book.records.values():
            if record.wanted:
                self._load(record)

    @property
    def num_loaded(self) -> int:
        """How many models are loaded on at least one worker."""
        return sum(entry.state == "loaded" for entry in self._book.entries())

    def is_progressing(self) -> bool:
        """Return whether something that readiness waits for is under way, not merely waiting for another try."""
        return bool(self._not_ready_reason()) or any(self._book.records[name].wanted for name in self._book.missing())

    def reconfigure(self, settings: Settings) -> None:
        """Take over reloaded settings."""
        self._idle_s = settings.models.idle_unload_s
        self._timeout_s = settings.models.load_timeout_s
        self._book.set_retry(settings.models.load_retry_s)
        self._preparer.reconfigure(settings)

    def replace(self, models: Models) -> tuple[str, ...]:
        """Make `models` the models of this server; return, in words, what of that has to wait for a restart.

        A new one to load at the start loads now, but readiness does not wait for it. One that is gone answers what
        was accepted and takes no more. One whose source changed stays as it is.
        """
        left: list[str] = []
        known = self._book.records
        for spec, preload, card in models:
            if spec.id not in known:
                self._book.add(spec, False, card)
                if preload:
                    self.want(spec.id)
            elif known[spec.id].spec != spec:
                left.append(f"the source of model {spec.id}")
        for name in known.keys() - {spec.id for spec, _, _ in models}:
            self._book.remove(name)
            self._crew.send_all(self._crew.workers, control.Unload(name))
        self.broadcast()
        return tuple(left)

    def greet(self, child: Child) -> None:
        """Tell a child that has just joined what it missed."""
        if child.role == "frontend":
            self._crew.send(child, self.message())
            return
        for record in self._book.records.values():
            if record.wanted and record.card is not None:
                self._crew.send(child, control.Load(record.card))

    def want(self, model: str) -> None:
        """Start a load that a request asked for, if it is time for one."""
        record = self._book.want(model, time.monotonic())
        if record is not None:
            self._load(record)
            self.broadcast()

    def touch(self, models: tuple[str, ...]) -> None:
        """Note which models are in use."""
        self._book.touch(models, time.monotonic())

    def report(self, worker: Child, report: control.ModelReport) -> None:
        """Take a worker's word on one of its models."""
        if report.model not in self._book.records:
            if report.state == "loaded":  # it was removed while it loaded
                self._crew.send(worker, control.Unload(report.model))
            return
        self._book.report(worker.slot, report, time.monotonic())
        if report.state == "loading" and report.progress is not None:
            self._progress.update(report.model, report.progress, report.detail)
            return
        if report.state == "loaded":
            self._progress.done(report.model, f"{worker.place.device} {report.dtype}".strip())
        elif report.state == "failed" and report.error is not None:
            self._progress.fail(report.model, report.error.message)
        self.broadcast()

    def forget_worker(self, slot: int, *, blame: bool) -> None:
        """Drop what a dead worker had loaded; blame: the death may be the doing of a load."""
        self._book.forget_worker(slot, time.monotonic(), blame=blame)

    def tick(self, now_s: float) -> None:
        """Do what is due: retries, loads that take too long, models that nobody uses."""
        for record in self._book.due_again(now_s):
            self._load(record)
            self.broadcast()
        for record, slot in self._book.overdue(self._timeout_s, now_s):
            reason = f"not loaded within load_timeout_s ({self._timeout_s:g} s)"
            del record.loading_since_s[slot]
            self._book.fail(record, failed(record.spec, reason, "TIMEOUT"), now_s)
            self._progress.fail(record.spec.id, reason)
            self._crew.workers[slot].kill()  # the load's thread ends with its process, and with nothing less
        self._unload_idle(now_s)

    def _unload_idle(self, now_s: float) -> None:
        for record in self._book.idle(self._idle_s, now_s) if self._idle_s > 0 else []:
            self._book.release(record)
            self._crew.send_all(self._crew.workers, control.Unload(record.spec.id))
            self.broadcast()

    def broadcast(self) -> None:
        """Send the state of all models to all frontends, once for however many changes one loop turn brings."""
        if not self._is_broadcast_due:
            self._is_broadcast_due = True
            asyncio.get_running_loop().call_soon(self._broadcast_now)

    def message(self) -> control.Models:
        """Return the state of everything, as frontends hear it."""
        reason = self.reason()
        workers = tuple(
            control.WorkerEntry(
                slot=worker.slot,
                device=worker.place.device,
                pid=worker.peer_pid,
                state="ready" if worker.state == "ready" else "dead" if worker.state == "gone" else "starting",
                restarts=worker.num_restarts,
            )
            for worker in self._crew.workers
        )
        return control.Models(self._book.entries(), not reason, reason, workers, self.config_error)

    def reason(self) -> str:
        """Return why the server is not ready, or an empty text when it is."""
        missing = self._book.missing()
        return self._not_ready_reason() or (f"not loaded: {', '.join(missing)}" if missing else "")

    def _broadcast_now(self) -> None:
        self._is_broadcast_due = False
        message = self.message()
        self._crew.send_all(self._crew.frontends, message)
        if message.ready and not self.was_ready:
            self.was_ready = True
            self._on_first_ready()

    def _load(self, record: Record) -> None:
        if record.card is not None:
            self._crew.send_all(self._crew.workers, control.Load(record.card))
        elif not record.preparing:
            record.preparing = True
            self._spawn(self._prepare(record))

    async def _prepare(self, record: Record) -> None:
        prepared = await self._preparer.prepare(record.spec)
        record.preparing = False
        if self._book.records.get(record.spec.id) is not record:  # removed meanwhile
            return
        if isinstance(prepared, WireError):
            self._book.fail(record, prepared, time.monotonic())
            self._progress.fail(record.spec.id, prepared.message)
        else:
            record.card = prepared
            self._load(record)
        self.broadcast()
