"""Keeps the state of each model and decides when to load and unload it.

Sends nothing itself: the server sends the messages. Times are seconds on a monotonic clock, passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec

from sie.catalog.profiles import known_profiles
from sie.catalog.spec import ModelSpec
from sie.ipc.messages import ModelEntry, ModelReport
from sie.supervisor.lifecycle import Event, LifeStage, Place, PlaceEvent, can, loaded_slots, next_place, next_stage
from sie.values.card import ModelCard, ModelState
from sie.values.errors import Internal, WireError, not_loaded, to_wire, without_paths
from sie.values.tensor import TensorRule

_MAX_REASON = 300
"""Most characters of a model's reason in the line that says why the server is not ready."""
_MAX_RETRY_S = 1800.0
_PERMANENT_ATTEMPTS = 8
_MAX_LOAD_LOSSES = 2
"""One may be the device's own fault; a third one within a minute would set the device aside."""
_PERMANENT_CLASSES = frozenset({"GATED", "NOT_FOUND", "DEPENDENCY", "CONFIG"})
_COOL_DOWNS = {"OOM": 2, "STORAGE": 2, "DEVICE": 4, "UNKNOWN": 20}
"""The first cool-down of each error class, as a multiple of load_retry_s; 1 for all others."""
# SIE API reference, section 12: 60, 60, 600 and 30 s; doubled with each attempt up to 1,800 s; at most eight attempts.


_SERVE_S: Final = 1.0
"""Time in which the requests that waited for a model reach a worker."""
_UNPLANNED: Final = (Event.SHORT, Event.FAIL, Event.RELEASE, Event.DISMISS, Event.RELOAD)
"""After these, the next load chooses its workers anew."""


class Record(msgspec.Struct):
    """One model. card is None until a hub model is fetched. `sie.supervisor.lifecycle` explains stage and places.

    The booleans are facts that hold in any stage. From settings or an administrator: preload, readiness waits for it;
    is_pinned, only an explicit unload removes it; may_fail, readiness stops waiting for it after a failed load;
    is_excused, it was unloaded, so readiness does not wait for it until it is loaded again. About its loads: has_failed,
    the last one that ended failed. About its files: is_stale, the next load reads them again; preparing, a helper reads
    them now. reports: those of the workers that have it loaded.
    """

    spec: ModelSpec
    preload: bool
    card: ModelCard | None = None
    is_pinned: bool = False
    may_fail: bool = False
    is_excused: bool = False
    has_failed: bool = False
    stage: LifeStage = LifeStage.IDLE
    slots: tuple[int, ...] | None = None
    """The workers that were chosen to load it, once they are."""
    places: dict[int, Place] = {}
    reports: dict[int, ModelReport] = {}
    is_stale: bool = False
    preparing: bool = False
    error: WireError | None = None
    num_attempts: int = 0
    failed_s: float = 0.0
    retry_at_s: float = 0.0
    last_used_s: float = 0.0
    loaded_s: float = 0.0
    """When a worker had it after none did."""
    served_s: float = 0.0
    """When a frontend last told that a request found it loaded."""
    waits_since_s: float = 0.0
    """When its load began to wait for memory that others hold; 0 if it does not."""
    victims: Collection[str] = ()
    """The models that are unloaded for this load, as soon as their clients are served."""
    loading_since_s: dict[int, float] = {}
    num_losses: int = 0
    """Workers in a row that lost their device while they loaded it."""

    @property
    def wanted(self) -> bool:
        """Whether workers should have the model."""
        return self.stage.is_wanted

    @property
    def loaded_on(self) -> tuple[int, ...]:
        """The slots of the workers that have it, ascending."""
        return loaded_slots(self.places)

    def apply(self, event: Event) -> None:
        """Change the stage as the table says."""
        self.stage = next_stage(self.stage, event)
        if event in _UNPLANNED:
            self.slots = None
        if event is not Event.SHORT:
            self.waits_since_s, self.victims = 0.0, ()

    def apply_at(self, slot: int, event: PlaceEvent) -> None:
        """Change the state on one worker as the table says."""
        self.places[slot] = next_place(self.place(slot), event)

    def place(self, slot: int) -> Place:
        """Return the state on one worker."""
        return self.places.get(slot, Place.ABSENT)

    def covers(self, leader: int, slot: int) -> bool:
        """Return whether a worker's device holds a part of it, if another worker, or the same, leads its group."""
        return leader <= slot < leader + (1 if self.card is None else self.card.tensor_parallel)

    def reaches(self, leader: int, slots: Collection[int]) -> bool:
        """Return whether the group of a worker that leads has one of these workers."""
        return any(self.covers(leader, slot) for slot in slots)

    @property
    def is_nowhere(self) -> bool:
        """Whether no worker has it, nor was chosen to load it, nor has failed to."""
        return self.slots is None and self.error is None and not any(place.is_there for place in self.places.values())

    def is_expected(self, slot: int) -> bool:
        """Return whether a worker will load it as soon as it is there."""
        is_chosen = self.wanted and self.slots is not None and slot in self.slots
        return is_chosen and self.error is None and not self.place(slot).is_there

    def is_moving(self, slot: int) -> bool:
        """Return whether a worker is loading or unloading it."""
        place = self.place(slot)
        return place in (Place.ASKED, Place.LOADING, Place.UNLOADING) or (place is Place.LOADED and not self.wanted)


class ModelRegistry:
    """Every model of this server, in the order of the settings."""

    def __init__(self, retry_s: float, *, is_strict: bool = True) -> None:
        """is_strict is the setting `strict_readiness`."""
        self._retry_s = retry_s
        self._is_strict = is_strict
        self.records: dict[str, Record] = {}

    def add(self, spec: ModelSpec, preload: bool, card: ModelCard | None, *, is_pinned: bool = False) -> Record:
        """Add a model. A model that loads before readiness is pinned, too."""
        record = self.records[spec.id] = Record(spec, preload, card, is_pinned or preload)
        if preload:
            _start(record)
        return record

    def remove(self, model: str) -> None:
        """Remove a model."""
        del self.records[model]

    def reconfigure(self, retry_s: float, *, is_strict: bool) -> None:
        """Change the wait after a failed load, and the meaning of readiness. Running cool-downs stay as they are."""
        self._retry_s, self._is_strict = retry_s, is_strict

    def want(self, model: str, now_s: float) -> Record | None:
        """Record a request for a model. Return its record if a load must start now, else None."""
        record = self.records.get(model)
        if record is None:
            return None
        record.last_used_s = now_s
        if _is_asked_for(record) or now_s < record.retry_at_s or record.spec.tensor is not None:
            return None  # only administrators load models of a repository
        _try_again(record)
        return record

    def demand(self, record: Record, now_s: float) -> bool:
        """Record an administrator's load, for which earlier failures do not count. Return whether it starts now."""
        record.last_used_s = now_s
        if _is_asked_for(record):
            return False
        _start(record)
        self._forgive(record)
        return True

    def dismiss(self, record: Record) -> None:
        """Record an administrator's unload."""
        record.apply(Event.DISMISS)
        self._forgive(record)
        record.is_excused = True

    def reload(self, record: Record, now_s: float) -> bool:
        """Record an administrator's reload. Return whether the model must be unloaded first."""
        record.is_stale = record.spec.directory is not None
        record.last_used_s = now_s
        self._forgive(record)
        record.apply(Event.RELOAD)
        return _is_moving(record)

    def renew(self, record: Record, now_s: float) -> bool:
        """Record a reload beside the serving model. Return False if no loaded copy could serve meanwhile."""
        if not (record.loaded_on and can(record.stage, Event.RENEW)):
            return False
        record.apply(Event.RENEW)
        record.is_stale = True
        record.last_used_s = now_s
        self._forgive(record)
        return True

    def due_reloads(self) -> list[Record]:
        """Return the models to load again that are unloaded everywhere, now marked as wanted."""
        due = [
            record
            for record in self.records.values()
            if record.stage.loads_again and not record.preparing and not _is_moving(record)
        ]
        for record in due:
            record.apply(Event.GONE)
        return due

    def _forgive(self, record: Record) -> None:
        record.error, record.num_attempts, record.retry_at_s, record.num_losses = None, 0, 0.0, 0

    def due_again(self, now_s: float) -> list[Record]:
        """Return the failed models that readiness waits for and whose cool-down is over, now marked as wanted.

        Without this, a server with one failed load would wait for requests that never come while it is not ready.
        """
        due = [
            record
            for record in self.records.values()
            if record.preload
            and not (_is_asked_for(record) or record.is_excused)
            and record.error is not None
            and now_s >= record.retry_at_s
        ]
        for record in due:
            _try_again(record)
        return due

    def refused_for_good(self) -> list[Record]:
        """Return the models in directories that are not tried again, although their files may change; none if nothing is."""
        return [
            record
            for record in self.records.values()
            if self._retry_s and _is_refused_for_good(record) and _is_local(record) and not _is_asked_for(record)
        ]

    def repair(self, record: Record) -> None:
        """Record that the files of such a model have changed: the next load reads them, and earlier failures do not count."""
        record.is_stale = True
        self._forgive(record)

    def overdue(self, timeout_s: float, now_s: float) -> list[tuple[Record, int]]:
        """Return (model, worker slot) of every load that takes longer than timeout_s."""
        return [
            (record, slot)
            for record in self.records.values()
            for slot, since_s in record.loading_since_s.items()
            if now_s - since_s > timeout_s
        ]

    def touch(self, models: tuple[str, ...], now_s: float) -> None:
        """Mark these models as used now."""
        for model in models:
            if model in self.records:
                self.records[model].last_used_s = self.records[model].served_s = now_s

    def report(self, slot: int, report: ModelReport, now_s: float) -> None:
        """Record a worker's report on one of its models."""
        record = self.records.get(report.model)
        if record is None:
            return
        was_loaded = bool(record.loaded_on)
        record.apply_at(slot, report.state)
        if report.state == "loaded" and not was_loaded:
            record.loaded_s = now_s
        if report.state != "loading":
            record.loading_since_s.pop(slot, None)
        elif report.progress is not None:  # a worker loads one model at a time; a model without progress still waits
            record.loading_since_s.setdefault(slot, now_s)
        record.reports.pop(slot, None)
        if report.state == "loaded":
            record.reports[slot] = report
            record.apply(Event.LOADED)
            if record.wanted:
                self._note_success(record, now_s)
        elif report.state == "failed" and report.error is not None and not _is_loading(record):
            self.fail(record, report.error, now_s)  # one attempt for all workers together

    def _note_success(self, record: Record, now_s: float) -> None:
        record.is_excused = record.has_failed = False
        record.last_used_s = max(record.last_used_s, now_s)
        if not record.is_stale:  # a stale model's error is about newer files than the loaded ones
            record.error, record.num_attempts = None, 0
            record.num_losses = 0

    def fail(self, record: Record, error: WireError, now_s: float) -> None:
        """Record a failed load and the time of its next try. Workers that have the model keep serving it."""
        record.num_attempts += 1
        record.has_failed, record.failed_s = True, now_s
        error_class = str(error.extras.get("error_class", "UNKNOWN"))
        is_last = record.num_attempts >= _PERMANENT_ATTEMPTS or not self._retry_s
        permanent = is_last or error_class in _PERMANENT_CLASSES
        extras: dict[str, Any] = {
            **error.extras, "error_class": error_class, "attempts": record.num_attempts, "permanent": permanent,
        }  # fmt: skip
        record.error = msgspec.structs.replace(error, code="MODEL_LOAD_FAILED", http_status=502, extras=extras)
        base_s = self._retry_s * _COOL_DOWNS.get(error_class, 1)
        cooldown_s = min(base_s * 2 ** (record.num_attempts - 1), _MAX_RETRY_S)
        record.retry_at_s = float("inf") if permanent else now_s + cooldown_s
        record.apply(Event.KEEP if record.loaded_on else Event.FAIL)

    def forget_worker(self, slot: int, now_s: float, *, blame: bool, is_lost: bool = False) -> None:
        """Forget the models of a dead worker; with blame, its running load counts as failed.

        Otherwise a checkpoint whose load kills its worker would load again and again, and each time take down the
        worker's other models. is_lost: the worker lost its device. That ends every load, so only the second such loss in a
        row counts as the load's fault, and none while another worker has the model.
        """
        for record in self.records.values():
            if slot not in record.loading_since_s:
                continue
            is_proven = bool(set(record.loaded_on) - {slot})
            record.num_losses += is_lost and not is_proven
            if blame or record.num_losses >= _MAX_LOAD_LOSSES:
                self._fail_deadly(record, now_s, is_lost=is_lost)
        for record in self.records.values():
            for by_slot in (record.places, record.reports, record.loading_since_s):
                by_slot.pop(slot, None)

    def _fail_deadly(self, record: Record, now_s: float, *, is_lost: bool) -> None:
        """Record that a load ended its worker."""
        record.num_losses = 0
        what = "workers lost their device" if is_lost else "the worker died"
        error_class = "DEVICE" if is_lost else "ENGINE"
        reason = not_loaded(record.spec.id, f"{what} while it loaded")
        self.fail(record, to_wire(Internal(reason, extras={"error_class": error_class})), now_s)

    def idle(self, idle_s: float, now_s: float) -> list[Record]:
        """Return the loaded, unpinned models that load nowhere else and were not used for idle_s."""
        return [
            record
            for record in self.records.values()
            if record.wanted
            and not record.is_pinned
            and record.loaded_on
            and not _is_loading(record)
            and now_s - record.last_used_s > idle_s
        ]

    def may_evict(self, record: Record, patience_s: float, now_s: float) -> bool:
        """Return whether all victims of a load may be unloaded now.

        None may be the victim of a load that waits longer: that one would wait for ever while others took its room piece
        by piece. And none may be fresh.
        """
        longer = [other for other in self.waiting() if other.waits_since_s < record.waits_since_s]
        taken = {victim for other in longer for victim in other.victims}
        return not any(victim in taken or self._is_fresh(victim, patience_s, now_s) for victim in record.victims)

    def _is_fresh(self, model: str, patience_s: float, now_s: float) -> bool:
        """Return whether a model that was loaded for some requests must stay for them.

        It stays for patience_s, in which clients that were told to come back do, or until a moment after it was used.
        Otherwise models that do not fit together would unload each other before any request was served.
        """
        record = self.records[model]
        stay_s = _SERVE_S if record.served_s >= record.loaded_s else patience_s
        return now_s < record.loaded_s + stay_s

    def waiting(self) -> list[Record]:
        """Return the models that wait for memory, the one that waits longest first."""
        waiting = [record for record in self.records.values() if record.stage.waits_for_memory]
        return sorted(waiting, key=lambda record: record.waits_since_s)

    def comes_after_others(self, record: Record) -> bool:
        """Return whether a load that has not waited yet would take the memory that others wait for."""
        return not record.stage.waits_for_memory and any(other.waits_since_s for other in self.waiting())

    def release(self, record: Record) -> None:
        """Stop wanting a model that is about to be unloaded."""
        record.apply(Event.RELEASE)

    def is_ready(self) -> bool:
        """Return whether every model to load before readiness is loaded on a live worker."""
        return not self.missing()

    def missing(self) -> list[str]:
        """Return the models that readiness still waits for."""
        return [name for name in self._absent() if not self._is_left_out(self.records[name])]

    def left_out(self) -> list[str]:
        """Return the models that failed to load and that readiness does not wait for."""
        return [name for name in self._absent() if self._is_left_out(self.records[name])]

    def _absent(self) -> list[str]:
        """Return the models to load before readiness that no worker has and nobody unloaded."""
        records = self.records.items()
        return [name for name, record in records if record.preload and not (record.is_excused or record.loaded_on)]

    def _is_left_out(self, record: Record) -> bool:
        """Return whether readiness no longer waits for a model.

        Its load failed, and either that is allowed or another model may still serve.
        """
        return record.has_failed and (record.may_fail or (not self._is_strict and self._has_hope_beside_failures()))

    def _has_hope_beside_failures(self) -> bool:
        return any(record.loaded_on or not record.has_failed for record in self.records.values())

    def failed(self) -> set[str]:
        """Return the models whose last load failed, unless a worker has them or they were unloaded since."""
        return {
            name
            for name, record in self.records.items()
            if record.has_failed and not (record.loaded_on or record.is_excused)
        }

    def lost_causes(self) -> list[WireError]:
        """Return the errors for which the server can never become ready; none as long as it can.

        They are those of models that readiness waits for and that are not tried again: one is enough, or all models of
        the server without `strict_readiness`.
        """
        errors = [record.error for record in self.records.values() if _has_no_hope(record) and record.error]
        return errors if self._is_strict or len(errors) == len(self.records) else []

    def missing_reasons(self) -> str:
        """Return the models that readiness still waits for, each with the reason, or an empty text."""
        return ", ".join(f"{name} ({_why_missing(self.records[name])})" for name in self.missing())

    def entries(self) -> tuple[ModelEntry, ...]:
        """Return all models for frontends."""
        return tuple(_entry(record) for record in self.records.values())


def _has_no_hope(record: Record) -> bool:
    """Return whether readiness waits for a model that is not tried again."""
    is_awaited = record.preload and not (record.is_excused or record.may_fail or record.loaded_on)
    return is_awaited and _is_refused_for_good(record)


def _is_refused_for_good(record: Record) -> bool:
    return record.error is not None and bool(record.error.extras.get("permanent"))


def is_refused(error: WireError) -> bool:
    """Return whether a load failed for a reason that the next start would find, too: its files, its name, a library."""
    return error.extras.get("error_class") in _PERMANENT_CLASSES


def _why_missing(record: Record) -> str:
    """Return why a model is not loaded, in one line without the server's paths, because anyone may read it."""
    if record.error is not None:
        return f"failed: {' '.join(without_paths(record.error).message.split())}"[:_MAX_REASON]
    return "waits for memory" if record.stage.waits_for_memory else _state(record, is_loaded=False)


def _start(record: Record) -> None:
    """Mark a model as wanted. It keeps serving on workers that have not begun to unload it."""
    record.apply(Event.WANT)
    if record.loaded_on:
        record.apply(Event.LOADED)


def _try_again(record: Record) -> None:
    """Start a load, perhaps after a failed one: then a directory may have other files than those that its card was made of."""
    _start(record)
    if record.error is not None:
        record.error = None
        record.is_stale = record.is_stale or _is_local(record)


def _is_local(record: Record) -> bool:
    return record.spec.directory is not None and record.spec.tensor is None


def _is_asked_for(record: Record) -> bool:
    """Return whether it is loaded, or will be without another event."""
    return record.wanted or record.stage.loads_again


def _is_moving(record: Record) -> bool:
    return any(map(record.is_moving, record.places))


def _is_loading(record: Record) -> bool:
    return Place.LOADING in record.places.values()


def _entry(record: Record) -> ModelEntry:
    workers, stage = record.loaded_on, record.stage
    return ModelEntry(
        card=record.card or _unread_card(record.spec),
        state=_state(record, bool(workers)),
        is_read=record.card is not None,
        recovering=stage in (LifeStage.SERVING, LifeStage.RENEWING) and not workers,
        reloading=stage.is_reloading,
        is_outdated=bool(workers) and stage.is_wanted and record.is_stale and record.error is not None,
        dismissed=stage is LifeStage.DISMISSED,
        preload=record.preload,
        workers=workers,
        device=next((report.device for report in record.reports.values()), ""),
        memory_bytes=sum(report.memory_bytes for report in record.reports.values()),
        cache_tokens=min((report.cache_tokens for report in record.reports.values()), default=0),
        fallbacks=tuple(
            {fallback.name: fallback for report in record.reports.values() for fallback in report.fallbacks}.values()
        ),
        error=record.error,
    )


def _unread_card(spec: ModelSpec) -> ModelCard:
    """Return a placeholder card for a model that was not fetched yet: its id, and the profiles it is offered as."""
    if spec.tensor is not None:
        rule = TensorRule(name=spec.tensor.name, version=spec.tensor.version, platform="", inputs=(), outputs=())
        return ModelCard(id=spec.id, kind="tensor", inputs=("tensor",), outputs=(), tensor=rule)
    profiles = {**known_profiles(spec.id), **spec.profiles}
    return ModelCard(id=spec.id, kind="encoder", revision=spec.revision, profiles=profiles)


def _state(record: Record, is_loaded: bool) -> ModelState:
    places = record.places.values()
    if is_loaded and record.wanted:
        return "loaded"
    if Place.UNLOADING in places or is_loaded:
        return "unloading"
    if record.stage is LifeStage.DISMISSED and Place.LOADING in places:  # it is unloaded as soon as its load has ended
        return "unloading"
    if _is_asked_for(record) or Place.LOADING in places:
        return "loading"
    return "failed" if record.error is not None else "available"
