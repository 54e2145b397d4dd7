"""Carries out what the model book decides: prepares, loads and unloads models, and keeps every frontend informed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from sie import control
from sie.errors import WireError
from sie.progress import Progress
from sie.settings import Settings
from sie.supervisor.children import Child
from sie.supervisor.crew import Crew
from sie.supervisor.models import ModelBook, Record
from sie.supervisor.prepare import Preparer, failed

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
        self._with_adapters: Callable[[tuple[control.ModelEntry, ...]], tuple[control.ModelEntry, ...]] = tuple
        self.was_ready = False
        """Whether everything was ready at least once."""

    def bind(self, crew: Crew, not_ready_reason: Callable[[], str], on_first_ready: Callable[[], None]) -> None:
        """Say whom to tell, and why the server would not be ready apart from its models."""
        self._crew = crew
        self._not_ready_reason = not_ready_reason
        self._on_first_ready = on_first_ready

    def bind_adapters(
        self, with_adapters: Callable[[tuple[control.ModelEntry, ...]], tuple[control.ModelEntry, ...]]
    ) -> None:
        """Say who knows the models' adapters."""
        self._with_adapters = with_adapters

    def start(self) -> None:
        """Begin with the models that readiness waits for."""
        for record in self._book.records.values():
            if record.wanted:
                self._load(record)

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
        return control.Models(self._with_adapters(self._book.entries()), not reason, reason, workers)

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
        if isinstance(prepared, WireError):
            self._book.fail(record, prepared, time.monotonic())
            self._progress.fail(record.spec.id, prepared.message)
        else:
            record.card = prepared
            self._load(record)
        self.broadcast()
