"""Applies the decisions of the model registry: prepares, loads and unloads models."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec

from sie.catalog.cards import with_profiles
from sie.catalog.spec import ModelSpec
from sie.config.settings import Settings
from sie.ipc import messages
from sie.metrics import definitions
from sie.runtime.logs import get_logger
from sie.runtime.progress import Progress
from sie.supervisor.card_helper import Preparer, failed
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.supervisor.configured_models import Models
from sie.supervisor.device_memory import DeviceMemories
from sie.supervisor.evictions import Memory
from sie.supervisor.lifecycle import Event
from sie.supervisor.model_registry import ModelRegistry, Record
from sie.supervisor.staged_reloads import StagedReloads
from sie.supervisor.state_broadcast import StateBroadcast
from sie.values.card import ModelCard
from sie.values.errors import SieError, WireError

_log = get_logger(__name__)
_RETURN_S = 1.0
"""A client that was told to come back may be late by so much."""
_PRESSURE_GAP_S = 2.0
"""Pause between two evictions under memory pressure: the memory that the first one frees must show up first."""

_MAX_WAIT_S = 1e9
"""A longer wait means that the model is not tried again."""

Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Loads:
    """Sends the loads and unloads of one server's models to its children."""

    def __init__(
        self,
        settings: Settings,
        registry: ModelRegistry,
        children: Children,
        state: StateBroadcast,
        *,
        progress: Progress,
        spawn: Spawn,
        preparer: Preparer,
    ) -> None:
        self._settings = settings.models
        self._generation = settings.generation
        self._idle_s = settings.models.idle_unload_s
        self._timeout_s = settings.models.load_timeout_s
        self._registry = registry
        self._children = children
        self._state = state
        self._progress = progress
        self._preparer = preparer
        self._spawn = spawn
        self._relieved_s = 0.0
        self._on_settled: Callable[[], None] = lambda: None
        self._on_lost_causes: Callable[[list[WireError]], None] = lambda _errors: None
        places = [worker.place for worker in children.workers]
        self._device_memories = DeviceMemories(self._settings, self._generation, places)
        self._staged_reloads = StagedReloads(
            children, self._preparer, self._spawn, self._cache_rooms, on_complete=self._reload, on_failed=self.keep
        )

    def bind_lost_causes(self, on_lost_causes: Callable[[list[WireError]], None]) -> None:
        """Set the callback for a start that cannot succeed: it gets the errors of the models at fault."""
        self._on_lost_causes = on_lost_causes

    def bind_repositories(self, on_settled: Callable[[], None]) -> None:
        """Set the callback for a model that has been loaded, unloaded or failed."""
        self._on_settled = on_settled

    def start(self) -> None:
        """Load the models that readiness waits for."""
        for record in self._registry.records.values():
            if record.wanted:
                self._load(record)

    def reconfigure(self, settings: Settings) -> None:
        """Apply reloaded settings."""
        self._settings = settings.models
        self._idle_s = settings.models.idle_unload_s
        self._timeout_s = settings.models.load_timeout_s
        self._registry.reconfigure(settings.models.load_retry_s, is_strict=settings.models.strict_readiness)
        self._preparer.reconfigure(settings)

    def replace(self, models: Models) -> tuple[str, ...]:
        """Make `models` the models of this server. Return descriptions of the changes that need a restart.

        A new model to load at the start loads now, but readiness does not wait for it. A removed model answers accepted
        requests and takes no new ones. Changed profiles are offered at once, because workers do not know them; a model
        whose definition has changed otherwise stays as it is.
        """
        left: list[str] = []
        known = self._registry.records
        for spec, preload, card in models:
            is_new = spec.id not in known
            record = self._registry.add(spec, False, card) if is_new else known[spec.id]
            record.is_pinned = preload or spec.id in self._settings.pinned
            if is_new and preload:
                self.want(spec.id)
            elif record.spec != spec and not _take_profiles(record, spec):
                left.append(f"the definition of model {spec.id}")
        from_settings = {name for name, record in known.items() if record.spec.tensor is None}
        for name in from_settings - {spec.id for spec, _, _ in models}:
            self._registry.remove(name)
            self._children.send_all(self._children.workers, messages.Unload(name))
        self._state.broadcast()
        return tuple(left)

    def greet(self, child: Child) -> None:
        """Send a child that has just joined the current state."""
        if child.role == "frontend":
            self._children.send(child, self._state.message())
            return
        now_s = time.monotonic()
        for record in self._registry.records.values():
            if record.card is None or not record.wanted or record.stage.waits_for_memory or record.preparing:
                continue
            if record.is_stale:  # its files have changed since it was loaded
                self._renew(record)
            elif record.slots is not None and child.slot not in record.slots:
                continue
            elif record.error is None or now_s >= record.retry_at_s:
                # A load before that would fail again, and perhaps kill the worker.
                self._send_load(record, record.card, [child])

    def want(self, model: str) -> None:
        """Start a load for a request, unless one runs or its cool-down has not ended."""
        record = self._registry.want(model, time.monotonic())
        if record is not None:
            self._load(record)
            self._state.broadcast()

    def manage(self, action: messages.ManageAction, model: str) -> None:
        """Apply an administrator's request. An action that is already done changes nothing."""
        record = self._registry.records.get(model)
        if record is None:
            return
        _log.info("%s of %s requested", action, model)
        if action == "load":
            self.load(record)
        elif action == "unload":
            self.cancel_staged(model)
            self._registry.dismiss(record)
            self._children.send_all(self._children.workers, messages.Unload(model))
        elif record.spec.tensor is not None and self._registry.renew(record, time.monotonic()):
            self._staged_reloads.begin(record)
        else:
            self.cancel_staged(model)
            self._reload(record)
        self._state.broadcast()

    def cancel_staged(self, model: str) -> None:
        """Cancel a model's staged reload, if there is one."""
        self._staged_reloads.cancel(model)

    def _renew(self, record: Record) -> None:
        """Load a model whose files have changed, beside the copy that still serves elsewhere, if there is one."""
        if self._staged_reloads.is_under_way(record.spec.id):
            return  # every worker is told when it is complete
        if self._registry.renew(record, time.monotonic()):
            self._staged_reloads.begin(record)
        else:
            self._load(record)

    def _reload(self, record: Record) -> None:
        """Unload a model everywhere, then load it again."""
        if self._registry.reload(record, time.monotonic()):
            self._children.send_all(self._children.workers, messages.Unload(record.spec.id))
        else:
            self._reload_due()
        self._state.broadcast()

    def keep(self, record: Record, error: WireError) -> None:
        """Record the reason why a model cannot be reloaded, and keep serving the loaded copy."""
        self.cancel_staged(record.spec.id)
        self._refuse(record, error)
        if record.loaded_on:
            _log.warning("%s keeps serving as it was loaded before", record.spec.id)

    def load(self, record: Record) -> None:
        """Load a model unless its load has begun. Earlier failures do not count."""
        if self._registry.demand(record, time.monotonic()):
            self._load(record)

    def retry_repaired(self, record: Record) -> None:
        """Let a model that was refused for good be loaded again, because its files have changed: now, or when it is wanted."""
        _log.info("the files of %s have changed since its load failed", record.spec.id)
        self._registry.repair(record)
        if record.preload and not record.is_excused:
            self.load(record)
        self._state.broadcast()

    def touch(self, models: tuple[str, ...]) -> None:
        """Mark these models as just used."""
        self._registry.touch(models, time.monotonic())

    def report(self, worker: Child, report: messages.ModelReport) -> None:
        """Record a worker's report on one of its models."""
        if report.model not in self._registry.records:
            if report.state == "loaded":  # it was removed during its load
                self._children.send(worker, messages.Unload(report.model))
            return
        self._registry.report(worker.slot, report, time.monotonic())
        if report.state == "loading" and report.progress is not None:
            self._progress.update(report.model, report.progress, report.detail, worker.name)
            return
        if report.state == "loaded":
            self._progress.done(report.model, f"{worker.place.device} {report.dtype}".strip(), worker.name)
        elif report.state == "failed" and report.error is not None:
            record = self._registry.records[report.model]
            self._progress.fail(report.model, f"{report.error.message}{_next_try(record)}", worker.name)
        self._settle()

    def on_worker_message(
        self,
        worker: Child,
        message: messages.MemoryReport | messages.MemoryShort | messages.Staged,
    ) -> None:
        """Handle a worker's message about its memory or about a staged load."""
        match message:
            case messages.MemoryReport(total_bytes, available_bytes):
                self.take_memory(worker, Memory(total_bytes, available_bytes))
            case messages.MemoryShort(model):
                self.relieve(worker, model)
            case messages.Staged():
                self._staged_reloads.on_staged(worker, message)

    def take_memory(self, worker: Child, memory: Memory) -> None:
        """Record a worker's memory. Start the loads that now fit, and evict a model under memory pressure."""
        self._device_memories.report(worker.slot, memory)
        for record in self._registry.waiting():
            self._load(record)
        now_s = time.monotonic()
        if now_s - self._relieved_s > _PRESSURE_GAP_S:
            victim = self._device_memories.pressure_victim(worker.slot, self._registry.records.values())
            if victim is not None:
                self._relieved_s = now_s
                self._evict(
                    victim, definitions.PRESSURE_EVICTIONS, f"{worker.place.device} is over memory_pressure_pct"
                )

    def relieve(self, worker: Child, model: str) -> None:
        """Evict another model because a step of this one ran out of memory."""
        victim = self._device_memories.shortage_victim(worker.slot, model, self._registry.records.values())
        if victim is not None:
            self._evict(victim, definitions.OOM_EVICTIONS, f"a step of {model} found no memory")

    def _evict(self, model: str, family: definitions.Family, reason: str, slots: Collection[int] = ()) -> None:
        """Unload a model from the workers in slots if others have it, too; else everywhere."""
        record, workers = self._registry.records[model], self._children.workers
        kept = tuple(leader for leader in record.loaded_on if slots and not record.reaches(leader, slots))
        if kept:
            workers = [worker for worker in workers if record.place(worker.slot).is_there and worker.slot not in kept]
            record.slots = kept
            for worker in workers:
                record.apply_at(worker.slot, "unloading")
        else:
            self._registry.release(record)
        where = f" from {', '.join(worker.place.device for worker in workers)}" if kept else ""
        _log.warning("%s is unloaded%s: %s", model, where, reason)
        self._children.page.count(family, model)
        self._children.send_all(workers, messages.Unload(model))
        self._state.broadcast()

    def forget_worker(self, slot: int, *, blame: bool, is_lost: bool = False) -> None:
        """Forget the models of a dead worker; blame: a load may have caused the death. is_lost: it lost its device."""
        self._registry.forget_worker(slot, time.monotonic(), blame=blame, is_lost=is_lost)
        self._device_memories.forget_worker(slot)
        self._staged_reloads.forget_worker(slot, blame=blame or is_lost)

    def tick(self, now_s: float) -> None:
        """Do the work that is due: retries, timeouts of loads, unloads of idle models."""
        for record in self._registry.due_again(now_s):
            self._load(record)
            self._state.broadcast()
        self._reload_due()
        self._move_stranded()
        self._end_overdue(now_s)
        for record in self._registry.idle(self._idle_s, now_s) if self._idle_s > 0 else []:
            self._evict(record.spec.id, definitions.IDLE_EVICTIONS, f"it was not used for {self._idle_s:g} s")

    def _reload_due(self) -> None:
        for record in self._registry.due_reloads():
            self._load(record)
            self._state.broadcast()

    def _away(self) -> set[int]:
        """Return the slots of the workers that will not be there for a while."""
        return {worker.slot for worker in self._children.workers if worker.state in ("lost", "gone")}

    def _move_stranded(self) -> None:
        """Load a model elsewhere if every copy of it has lost a device and there is room. Otherwise it waits for the device."""
        away, records = self._away(), self._registry.records.values()
        for record in records if away else ():
            is_stranded = (
                record.wanted and record.slots and all(record.reaches(leader, away) for leader in record.slots)
            )
            if is_stranded and self._device_memories.has_place_without(record, records, away):
                self._load(record)

    def _end_overdue(self, now_s: float) -> None:
        self._staged_reloads.end_overdue(self._timeout_s, now_s)
        overdue = self._registry.overdue(self._timeout_s, now_s)
        for record in {id(record): record for record, _ in overdue}.values():
            reason = f"not loaded within load_timeout_s ({self._timeout_s:g} s)"
            self._registry.fail(record, failed(record.spec, reason, "TIMEOUT"), now_s)
            self._progress.fail(record.spec.id, reason)
        for record, slot in overdue:
            del record.loading_since_s[slot]
            self._children.workers[slot].kill()  # only the end of the process ends the load's thread

    def _load(self, record: Record) -> None:
        """Send a model to the workers once it is prepared and fits in memory."""
        if record.preparing:  # `_prepare` loads it afterwards
            return
        if record.is_stale and (card := self._staged_reloads.take(record.spec.id)) is not None:
            record.card, record.is_stale = _with_own_profiles(card, record), False
        if record.card is None or record.is_stale:
            record.preparing = True
            self._spawn(self._prepare(record))
            return
        records = self._registry.records.values()
        if self._device_memories.is_early(record, records):
            record.apply(Event.SHORT)
            return
        if self._registry.comes_after_others(record):
            self._wait_for_memory(record)
            return
        plan = self._device_memories.plan_load(record, records, self._away())
        if plan.must_wait:
            self._wait_for_memory(record, plan.victims)
        else:
            record.apply(Event.FITS)
        if plan.refusal:
            self._refuse(record, failed(record.spec, plan.refusal, "PLACEMENT"))
        elif not plan.must_wait:
            record.slots = plan.slots
            self._send_load(record, record.card, [self._children.workers[slot] for slot in plan.slots])
        patience_s = self._settings.loading_retry_after_s + _RETURN_S
        if self._registry.may_evict(record, patience_s, time.monotonic()):
            for model, slots in plan.victims.items():
                self._evict(model, definitions.PRESSURE_EVICTIONS, f"{record.spec.id} needs its memory", slots)

    def _wait_for_memory(self, record: Record, victims: Collection[str] = ()) -> None:
        record.waits_since_s, record.victims = record.waits_since_s or time.monotonic(), victims
        record.apply(Event.SHORT)

    def _send_load(self, record: Record, card: ModelCard, workers: list[Child]) -> None:
        """Tell workers to load a model. It counts as loading from here on, since free memory is now unknown."""
        for worker in workers:
            if worker.channel is not None:
                record.apply_at(worker.slot, "ask")
        if card.generate is not None and (names := card.generate.unserved_settings):
            _log.warning("%s: its generation_config.json sets what has no effect here: %s", card.id, ", ".join(names))
        rooms = self._cache_rooms(record, [worker.slot for worker in workers])
        for worker in workers:
            self._children.send(worker, messages.Load(card, rooms[worker.slot]))

    def _cache_rooms(self, record: Record, slots: Collection[int]) -> dict[int, messages.CacheRoom]:
        return self._device_memories.cache_rooms(record, slots, self._registry.records.values())

    async def _prepare(self, record: Record) -> None:
        record.is_stale = False  # later changes need another read
        prepared = await self._preparer.prepare(record.spec)
        record.preparing = False
        if self._registry.records.get(record.spec.id) is not record:  # it was removed meanwhile
            return
        if isinstance(prepared, WireError):
            record.is_stale = True
            self._refuse(record, prepared)
        else:
            record.card = _with_own_profiles(prepared, record)
            if record.wanted:  # it may have been unloaded during its preparation
                self._load(record)
        self._state.broadcast()

    def _refuse(self, record: Record, error: WireError) -> None:
        self._registry.fail(record, error, time.monotonic())
        self._progress.fail(record.spec.id, f"{error.message}{_next_try(record)}")
        self._settle()

    def _settle(self) -> None:
        """Tell the others that a model has been loaded, unloaded or failed."""
        self._on_settled()
        self._state.broadcast()
        if not self._state.was_ready and (errors := self._registry.lost_causes()):
            self._on_lost_causes(errors)


def _next_try(record: Record) -> str:
    """Return the end of the line about a failed load: the time of the next try, if readiness waits for the model."""
    if record.error is None or not record.preload or record.may_fail:
        return ""
    wait_s = record.retry_at_s - time.monotonic()
    return f"; the next try is in {wait_s:.0f} s" if wait_s < _MAX_WAIT_S else "; it is not tried again"


def _take_profiles(record: Record, spec: ModelSpec) -> bool:
    """Give a model the profiles of a new definition. Return False if more has changed, or it cannot have them."""
    if msgspec.structs.replace(record.spec, profiles=spec.profiles) != spec:
        return False
    try:
        card = with_profiles(record.card, spec) if record.card is not None else None
    except SieError as error:
        _log.warning("the profiles of %s stay as they are: %s", spec.id, error.message)
        return False
    record.spec, record.card = spec, card
    return True


def _with_own_profiles(card: ModelCard, record: Record) -> ModelCard:
    """Return a card that was read while the profiles of its model may have changed."""
    try:
        return with_profiles(card, record.spec)
    except SieError as error:
        _log.warning("profiles of %s are left out: %s", record.spec.id, error.message)
        return card
