"""Carries out what the model book decides: prepares, loads and unloads models, and keeps every frontend informed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal

from sie.catalog.spec import ModelSpec
from sie.config.settings import Settings
from sie.ipc import messages
from sie.metrics import definitions
from sie.runtime.logs import get_logger
from sie.runtime.progress import Progress
from sie.supervisor.card_helper import Preparer, failed
from sie.supervisor.children import Child, ChildState
from sie.supervisor.crew import Crew
from sie.supervisor.evictions import Memory
from sie.supervisor.models import ModelBook, Record
from sie.supervisor.room import Rooms
from sie.supervisor.successions import Successions
from sie.values.card import ModelCard
from sie.values.errors import WireError

_log = get_logger(__name__)
_SHOWN_STATES: Final[dict[ChildState, Literal["starting", "ready", "lost", "dead"]]] = {
    "waiting": "starting", "starting": "starting", "ready": "ready", "lost": "lost", "gone": "dead",
}  # fmt: skip
_PRESSURE_GAP_S = 2.0
"""Between two models that go because of pressure: what the first one frees has to show."""

Models = list[tuple[ModelSpec, bool, ModelCard | None]]
"""Of each model its spec, whether it is loaded at the start, and its card if that is known."""
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Loads:
    """The models of one server, as messages to its children."""

    def __init__(
        self, settings: Settings, book: ModelBook, progress: Progress, spawn: Spawn, preparer: Preparer | None = None
    ) -> None:
        self._settings = settings.models
        self._idle_s = settings.models.idle_unload_s
        self._timeout_s = settings.models.load_timeout_s
        self._book = book
        self._progress = progress
        self._preparer = preparer or Preparer(settings, progress)
        self._spawn = spawn
        self._is_broadcast_due = False
        self._relieved_s = 0.0
        self._not_ready_reason: Callable[[], str] = str
        self._with_adapters: Callable[[tuple[messages.ModelEntry, ...]], tuple[messages.ModelEntry, ...]] = tuple
        self._on_settled: Callable[[], None] = lambda: None
        self.was_ready = False
        """Whether everything was ready at least once."""
        self.config_error = self.tls_error = ""
        """Why the latest reload of the settings changed nothing; every frontend hears it."""

    def bind(self, crew: Crew, not_ready_reason: Callable[[], str], on_first_ready: Callable[[], None]) -> None:
        """Say whom to tell, and why the server would not be ready apart from its models."""
        self._crew = crew
        self._rooms = Rooms(self._settings, [worker.place.device for worker in crew.workers])
        self._successions = Successions(
            crew, self._preparer, self._spawn, on_standing=self._reload, on_failed=self._keep
        )
        self._not_ready_reason = not_ready_reason
        self._on_first_ready = on_first_ready

    def bind_adapters(
        self,
        with_adapters: Callable[[tuple[messages.ModelEntry, ...]], tuple[messages.ModelEntry, ...]],
    ) -> None:
        """Say who knows the models' adapters."""
        self._with_adapters = with_adapters

    def bind_repositories(self, on_settled: Callable[[], None]) -> None:
        """Say who is to hear when a model has come, gone or failed."""
        self._on_settled = on_settled

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
        self._settings = settings.models
        self._idle_s = settings.models.idle_unload_s
        self._timeout_s = settings.models.load_timeout_s
        self._book.set_retry(settings.models.load_retry_s)
        self._preparer.reconfigure(settings)

    def replace(self, models: Models) -> tuple[str, ...]:
        """Make `models` the models of this server; return, in words, what of that has to wait for a restart.

        A new one to load at the start loads now, but readiness does not wait for it. One that is gone answers what
        was accepted and takes no more. One whose definition changed stays as it is.
        """
        left: list[str] = []
        known = self._book.records
        for spec, preload, card in models:
            is_new = spec.id not in known
            record = self._book.add(spec, False, card) if is_new else known[spec.id]
            record.is_pinned = preload or spec.id in self._settings.pinned
            if is_new and preload:
                self.want(spec.id)
            elif record.spec != spec:
                left.append(f"the definition of model {spec.id}")
        from_settings = {name for name, record in known.items() if record.spec.tensor is None}
        for name in from_settings - {spec.id for spec, _, _ in models}:
            self._book.remove(name)
            self._crew.send_all(self._crew.workers, messages.Unload(name))
        self.broadcast()
        return tuple(left)

    def greet(self, child: Child) -> None:
        """Tell a child that has just joined what it missed."""
        if child.role == "frontend":
            self._crew.send(child, self.message())
            return
        now_s = time.monotonic()
        for record in self._book.records.values():
            if record.card is None or not record.wanted or record.waits_for_room or record.preparing:
                continue
            if record.is_stale:  # its files are others than those that were loaded
                self._renew(record)
            elif record.error is None or now_s >= record.retry_at_s:  # else it would fail here again, and perhaps kill
                self._send_load(record, record.card, [child])

    def want(self, model: str) -> None:
        """Start a load that a request asked for, if it is time for one."""
        record = self._book.want(model, time.monotonic())
        if record is not None:
            self._load(record)
            self.broadcast()

    def manage(self, action: messages.ManageAction, model: str) -> None:
        """Do what an administrator asked for; what is done already is left alone."""
        record = self._book.records.get(model)
        if record is None:
            return
        _log.info("%s is asked to %s", model, action)
        if action == "load":
            self.load(record)
        elif action == "unload":
            self.call_off(model)
            self._book.dismiss(record)
            self._crew.send_all(self._crew.workers, messages.Unload(model))
        elif record.spec.tensor is not None and self._book.renew(record, time.monotonic()):
            self._successions.begin(record)
        else:
            self.call_off(model)
            self._reload(record)
        self.broadcast()

    def call_off(self, model: str) -> None:
        """Give up what is loaded beside a model, if anything is."""
        self._successions.call_off(model)

    def _renew(self, record: Record) -> None:
        """Load a model whose files are others by now: beside what serves elsewhere, if something does."""
        if self._successions.is_under_way(record.spec.id):
            return  # and when that stands, every worker is told
        if self._book.renew(record, time.monotonic()):
            self._successions.begin(record)
        else:
            self._load(record)

    def _reload(self, record: Record) -> None:
        """Have a model go everywhere, and then come back."""
        if self._book.reload(record, time.monotonic()):
            self._crew.send_all(self._crew.workers, messages.Unload(record.spec.id))
        else:
            self._reload_due()
        self.broadcast()

    def _keep(self, record: Record, error: WireError) -> None:
        """Leave a model as it was loaded."""
        self._refuse(record, error)
        if record.loaded_on:
            _log.warning("%s goes on as it was loaded before", record.spec.id)

    def load(self, record: Record) -> None:
        """Load a model, unless that has begun: earlier failures do not count."""
        if self._book.demand(record, time.monotonic()):
            self._load(record)

    def touch(self, models: tuple[str, ...]) -> None:
        """Note which models are in use."""
        self._book.touch(models, time.monotonic())

    def report(self, worker: Child, report: messages.ModelReport) -> None:
        """Take a worker's word on one of its models."""
        if report.model not in self._book.records:
            if report.state == "loaded":  # it was removed while it loaded
                self._crew.send(worker, messages.Unload(report.model))
            return
        self._book.report(worker.slot, report, time.monotonic())
        if report.state == "loading" and report.progress is not None:
            self._progress.update(report.model, report.progress, report.detail)
            return
        if report.state == "loaded":
            self._progress.done(report.model, f"{worker.place.device} {report.dtype}".strip())
        elif report.state == "failed" and report.error is not None:
            self._progress.fail(report.model, report.error.message)
        self._on_settled()
        self.broadcast()

    def hear(
        self,
        worker: Child,
        message: messages.MemoryReport | messages.MemoryShort | messages.Staged,
    ) -> None:
        """Take a worker's word on its memory, or on what it was to load beside a model."""
        match message:
            case messages.MemoryReport(total_bytes, available_bytes):
                self.take_memory(worker, Memory(total_bytes, available_bytes))
            case messages.MemoryShort(model):
                self.relieve(worker, model)
            case messages.Staged():
                self._successions.on_staged(worker, message)

    def take_memory(self, worker: Child, memory: Memory) -> None:
        """Take a worker's measurement: start the loads that now have room, and make some where too little is left."""
        self._rooms.report(worker.slot, memory)
        records = self._book.records.values()
        for record in records:
            if record.waits_for_room and record.wanted:
                self._load(record)
        now_s = time.monotonic()
        if now_s - self._relieved_s > _PRESSURE_GAP_S:
            victim = self._rooms.pressure_victim(worker.slot, records)
            if victim is not None:
                self._relieved_s = now_s
                self._evict(
                    victim, definitions.PRESSURE_EVICTIONS, f"{worker.place.device} is over memory_pressure_pct"
                )

    def relieve(self, worker: Child, model: str) -> None:
        """Unload another model because a step of this one found no memory."""
        victim = self._rooms.shortage_victim(worker.slot, model, self._book.records.values())
        if victim is not None:
            self._evict(victim, definitions.OOM_EVICTIONS, f"a step of {model} found no memory")

    def _evict(self, model: str, family: definitions.Family, reason: str) -> None:
        _log.warning("%s is unloaded: %s", model, reason)
        self._book.release(self._book.records[model])
        self._crew.count(family, model)
        self._crew.send_all(self._crew.workers, messages.Unload(model))
        self.broadcast()

    def forget_worker(self, slot: int, *, blame: bool) -> None:
        """Drop what a dead worker had loaded; blame: the death may be the doing of a load."""
        self._book.forget_worker(slot, time.monotonic(), blame=blame)
        self._successions.forget_worker(slot, blame=blame)

    def tick(self, now_s: float) -> None:
        """Do what is due: retries, loads that take too long, models that nobody uses."""
        for record in self._book.due_again(now_s):
            self._load(record)
            self.broadcast()
        self._reload_due()
        self._end_overdue(now_s)
        for record in self._book.idle(self._idle_s, now_s) if self._idle_s > 0 else []:
            self._evict(record.spec.id, definitions.IDLE_EVICTIONS, f"nobody used it for {self._idle_s:g} s")

    def _reload_due(self) -> None:
        for record in self._book.due_reloads():
            self._load(record)
            self.broadcast()

    def _end_overdue(self, now_s: float) -> None:
        self._successions.end_overdue(self._timeout_s, now_s)
        overdue = self._book.overdue(self._timeout_s, now_s)
        for record in {id(record): record for record, _ in overdue}.values():
            reason = f"not loaded within load_timeout_s ({self._timeout_s:g} s)"
            self._book.fail(record, failed(record.spec, reason, "TIMEOUT"), now_s)
            self._progress.fail(record.spec.id, reason)
        for record, slot in overdue:
            del record.loading_since_s[slot]
            self._crew.workers[slot].kill()  # the load's thread ends with its process, and with nothing less

    def set_tls_error(self, problem: str) -> None:
        """Tell all frontends why the TLS files were not taken over; empty when they were."""
        self.tls_error = problem
        self.broadcast()

    def broadcast(self) -> None:
        """Send the state of all models to all frontends, once for however many changes one loop turn brings."""
        if not self._is_broadcast_due:
            self._is_broadcast_due = True
            asyncio.get_running_loop().call_soon(self._broadcast_now)

    def message(self) -> messages.Models:
        """Return the state of everything, as frontends hear it."""
        reason = self.reason()
        workers = tuple(
            messages.WorkerEntry(
                slot=worker.slot,
                device=worker.place.device,
                pid=worker.peer_pid,
                state=_SHOWN_STATES[worker.state],
                restarts=worker.num_restarts,
            )
            for worker in self._crew.workers
        )
        entries = self._with_adapters(self._book.entries())
        return messages.Models(entries, not reason, reason, workers, self.config_error, self.tls_error)

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
        """Send a model to the workers: after it was prepared, and when there is room."""
        if record.is_stale and (card := self._successions.take(record.spec.id)) is not None:
            record.card, record.is_stale = card, False
        if record.card is None or record.is_stale:
            if not record.preparing:
                record.preparing = True
                self._spawn(self._prepare(record))
            return
        room = self._rooms.for_load(record, self._book.records.values())
        record.waits_for_room = room.must_wait
        if room.refusal:
            self._refuse(record, failed(record.spec, room.refusal, "PLACEMENT"))
        elif not room.must_wait:
            self._send_load(record, record.card, self._crew.workers)
        for model in room.victims:
            self._evict(model, definitions.PRESSURE_EVICTIONS, f"{record.spec.id} needs its memory")

    def _send_load(self, record: Record, card: ModelCard, workers: list[Child]) -> None:
        """Tell workers to load a model; from here on it counts as loading, since what is free cannot be known."""
        record.asked.update(
            worker.slot for worker in workers if worker.channel is not None and not record.is_on(worker.slot)
        )
        self._crew.send_all(workers, messages.Load(card))

    async def _prepare(self, record: Record) -> None:
        prepared = await self._preparer.prepare(record.spec)
        record.preparing = False
        if self._book.records.get(record.spec.id) is not record:  # removed meanwhile
            return
        if isinstance(prepared, WireError):
            self._refuse(record, prepared)
        else:
            record.card, record.is_stale = prepared, False
            if record.wanted:  # else it was unloaded before it was there
                self._load(record)
        self.broadcast()

    def _refuse(self, record: Record, error: WireError) -> None:
        self._book.fail(record, error, time.monotonic())
        self._progress.fail(record.spec.id, error.message)
        self._on_settled()
        self.broadcast()
