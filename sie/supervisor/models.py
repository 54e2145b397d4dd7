"""Owns what the supervisor knows of each model: who asked for it, which workers have it, when to load and unload.

Decides and records only; the server sends the messages. Times are seconds on a monotonic clock, passed in.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sie.catalog.profiles import known_profiles
from sie.catalog.spec import ModelSpec
from sie.ipc.messages import ModelEntry, ModelReport
from sie.values.card import ModelCard, ModelState
from sie.values.errors import Internal, WireError, to_wire
from sie.values.tensor import TensorRule

_MAX_RETRY_S = 1800.0
_PERMANENT_ATTEMPTS = 8
_PERMANENT_CLASSES = frozenset({"GATED", "NOT_FOUND", "DEPENDENCY", "CONFIG"})
_COOL_DOWNS = {"OOM": 2, "STORAGE": 2, "UNKNOWN": 20}
"""How many times load_retry_s the first cool-down of a class is; 1 for all others."""
# SIE API reference, section 12: 60, 60, 600 and 30 s; doubled with each attempt up to 1,800 s; eight are enough.


class Record(msgspec.Struct):
    """One model. card is None until a hub model was fetched; wanted means that workers should have it loaded.

    is_pinned: only a request to unload it takes it away. dismissed: such a request did, and readiness does not wait
    for it until it is loaded again. reloads: it is to be loaded again once it has gone everywhere, from files that are
    read anew (is_stale). waits_for_room: its load has not been sent to the workers. asked: the slots of workers that
    were sent it and have not answered. is_released: it was let go and not wanted since, so that a report that crosses
    its unload does not bring it back. reloading: it was loaded when a reload began that has not ended. may_fail: readiness no longer waits for it once a load of it has failed.
    """

    spec: ModelSpec
    preload: bool
    card: ModelCard | None = None
    is_pinned: bool = False
    may_fail: bool = False
    wanted: bool = False
    dismissed: bool = False
    reloads: bool = False
    reloading: bool = False
    is_stale: bool = False
    waits_for_room: bool = False
    asked: set[int] = set()
    is_released: bool = False
    preparing: bool = False
    was_loaded: bool = False
    reports: dict[int, ModelReport] = {}
    error: WireError | None = None
    num_attempts: int = 0
    retry_at_s: float = 0.0
    last_used_s: float = 0.0
    loading_since_s: dict[int, float] = {}

    @property
    def loaded_on(self) -> tuple[int, ...]:
        """The slots of the workers that have it, ascending."""
        return tuple(sorted(slot for slot, report in self.reports.items() if report.state == "loaded"))

    def is_on(self, slot: int) -> bool:
        """Tell whether a worker has it, or is about to."""
        report = self.reports.get(slot)
        return slot in self.asked or (report is not None and report.state != "failed")

    def is_moving(self, slot: int) -> bool:
        """Tell whether it is on its way into a worker or out of it."""
        report = self.reports.get(slot)
        return slot in self.asked or (
            report is not None
            and (report.state in ("loading", "unloading") or (report.state == "loaded" and not self.wanted))
        )


class ModelBook:
    """Every model of this server, in the order in which they were named."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self.records: dict[str, Record] = {}

    def add(self, spec: ModelSpec, preload: bool, card: ModelCard | None, *, is_pinned: bool = False) -> Record:
        """Make a model known; one that is loaded before readiness is pinned, too."""
        record = self.records[spec.id] = Record(spec, preload, card, is_pinned or preload, wanted=preload)
        return record

    def remove(self, model: str) -> None:
        """Forget a model."""
        del self.records[model]

    def set_retry(self, retry_s: float) -> None:
        """Change the wait after a failed load; cool-downs that run stay as they are."""
        self._retry_s = retry_s

    def want(self, model: str, now_s: float) -> Record | None:
        """Note that a request came for a model. Return its record when a load has to start now, else None."""
        record = self.records.get(model)
        if record is None:
            return None
        record.last_used_s = now_s
        if record.wanted or record.reloads or now_s < record.retry_at_s or record.spec.tensor is not None:
            return None  # models of a repository follow those who may load and unload, and nobody else
        self._start_to_want(record)
        record.error = None
        return record

    def demand(self, record: Record, now_s: float) -> bool:
        """Note that somebody who may asked for a load: earlier failures do not count. Return whether it starts now."""
        record.last_used_s = now_s
        if record.wanted or record.reloads:
            return False
        self._start_to_want(record)
        self._forgive(record)
        return True

    def dismiss(self, record: Record) -> None:
        """Note that somebody who may asked for an unload."""
        self.release(record)
        self._forgive(record)
        record.reloads, record.reloading, record.dismissed = False, False, True

    def reload(self, record: Record, now_s: float) -> bool:
        """Note that somebody who may asked for a reload; return whether the model has to go first."""
        record.is_stale = record.spec.directory is not None
        record.last_used_s = now_s
        self._forgive(record)
        record.reloading = record.reloading or bool(record.loaded_on)
        self.release(record)
        record.reloads = True
        return _is_moving(record)

    def renew(self, record: Record, now_s: float) -> bool:
        """Note a reload by a successor that is loaded beside the model; False where there is nothing to go on serving."""
        if not (record.wanted and record.loaded_on):
            return False
        record.is_stale = record.reloading = True
        record.last_used_s = now_s
        self._forgive(record)
        return True

    def due_reloads(self) -> list[Record]:
        """Return the models that have gone everywhere and are to be loaded again; now wanted."""
        due = [
            record
            for record in self.records.values()
            if record.reloads and not record.preparing and not _is_moving(record)
        ]
        for record in due:
            record.reloads = False
            self._start_to_want(record)
        return due

    def _start_to_want(self, record: Record) -> None:
        record.wanted, record.is_released = True, False

    def _forgive(self, record: Record) -> None:
        record.error, record.num_attempts, record.retry_at_s = None, 0, 0.0

    def due_again(self, now_s: float) -> list[Record]:
        """Return the models that readiness waits for, whose load failed and whose cool-down is over; now wanted again.

        Without this a server that failed once would wait for requests that its red readiness keeps away.
        """
        due = [
            record
            for record in self.records.values()
            if record.preload
            and not (record.wanted or record.dismissed)
            and record.error is not None
            and now_s >= record.retry_at_s
        ]
        for record in due:
            self._start_to_want(record)
            record.error = None
        return due

    def overdue(self, timeout_s: float, now_s: float) -> list[tuple[Record, int]]:
        """Return (model, worker slot) of every load that takes longer than timeout_s."""
        return [
            (record, slot)
            for record in self.records.values()
            for slot, since_s in record.loading_since_s.items()
            if now_s - since_s > timeout_s
        ]

    def touch(self, models: tuple[str, ...], now_s: float) -> None:
        """Note that these models answered requests just now."""
        for model in models:
            if model in self.records:
                self.records[model].last_used_s = now_s

    def report(self, slot: int, report: ModelReport, now_s: float) -> None:
        """Take a worker's word on one of its models."""
        record = self.records.get(report.model)
        if record is None:
            return
        if report.state not in ("unloading", "available"):  # those may answer what was said before the load
            record.asked.discard(slot)
        if report.state != "loading":
            record.loading_since_s.pop(slot, None)
        elif report.progress is not None:  # a worker loads one model at a time; without progress this one still waits
            record.loading_since_s.setdefault(slot, now_s)
        if report.state == "available":
            record.reports.pop(slot, None)
        else:
            record.reports[slot] = report
        if report.state == "loaded" and not record.reloads and not record.is_released:
            record.wanted = record.was_loaded = True
            record.dismissed = record.reloading = False
            record.error, record.num_attempts = None, 0
            record.last_used_s = max(record.last_used_s, now_s)
        elif report.state == "failed" and report.error is not None and not _is_loading(record):
            self.fail(record, report.error, now_s)  # one attempt, however many workers made it

    def fail(self, record: Record, error: WireError, now_s: float) -> None:
        """Record a failed load, and when it may be tried again; workers that have the model go on serving it."""
        record.num_attempts += 1
        error_class = str(error.extras.get("error_class", "UNKNOWN"))
        permanent = error_class in _PERMANENT_CLASSES or record.num_attempts >= _PERMANENT_ATTEMPTS
        extras: dict[str, Any] = {
            **error.extras, "error_class": error_class, "attempts": record.num_attempts, "permanent": permanent,
        }  # fmt: skip
        record.error = msgspec.structs.replace(error, code="MODEL_LOAD_FAILED", http_status=502, extras=extras)
        base_s = self._retry_s * _COOL_DOWNS.get(error_class, 1)
        cooldown_s = min(base_s * 2 ** (record.num_attempts - 1), _MAX_RETRY_S)
        record.retry_at_s = float("inf") if permanent else now_s + cooldown_s
        record.preparing = record.waits_for_room = record.reloading = False
        if not record.loaded_on:
            record.wanted = record.was_loaded = False

    def forget_worker(self, slot: int, now_s: float, *, blame: bool) -> None:
        """Drop what a dead worker had loaded; with blame, a load that was going on there has failed.

        Otherwise a checkpoint whose load kills its worker would be loaded again for ever, and take the worker's other
        models down each time.
        """
        for record in self.records.values():
            if not blame or slot not in record.loading_since_s:
                continue
            reason = f"Model '{record.spec.id}': the worker died while it loaded"
            self.fail(record, to_wire(Internal(reason, extras={"error_class": "ENGINE"})), now_s)
        for record in self.records.values():
            record.reports.pop(slot, None)
            record.loading_since_s.pop(slot, None)
            record.asked.discard(slot)

    def idle(self, idle_s: float, now_s: float) -> list[Record]:
        """Return the models that are loaded, not pinned, load nowhere else and were not used for idle_s."""
        return [
            record
            for record in self.records.values()
            if record.wanted
            and not record.is_pinned
            and record.loaded_on
            and not _is_loading(record)
            and now_s - record.last_used_s > idle_s
        ]

    def release(self, record: Record) -> None:
        """Stop wanting a model: it is about to be unloaded."""
        record.wanted = record.was_loaded = record.waits_for_room = False
        record.is_released = True

    def is_ready(self) -> bool:
        """Return whether every model to load before readiness is loaded on a live worker."""
        return not self.missing()

    def missing(self) -> list[str]:
        """Return the models that readiness still waits for."""
        return [
            name
            for name, record in self.records.items()
            if record.preload
            and not (record.dismissed or record.loaded_on or (record.may_fail and record.num_attempts))
        ]

    def entries(self) -> tuple[ModelEntry, ...]:
        """Return all models as frontends see them."""
        return tuple(_entry(record) for record in self.records.values())


def _is_moving(record: Record) -> bool:
    return any(record.is_moving(slot) for slot in (*record.reports, *record.asked))


def _is_loading(record: Record) -> bool:
    return any(report.state == "loading" for report in record.reports.values())


def _entry(record: Record) -> ModelEntry:
    workers = record.loaded_on
    reports = list(record.reports.values())
    return ModelEntry(
        card=record.card or _unread_card(record.spec),
        state=_state(record, bool(workers)),
        is_read=record.card is not None,
        recovering=record.wanted and record.was_loaded and not workers,
        reloading=record.reloading,
        is_outdated=bool(workers) and record.wanted and record.is_stale and record.error is not None,
        dismissed=record.dismissed,
        preload=record.preload,
        workers=workers,
        device=next((report.device for report in reports if report.state == "loaded"), ""),
        memory_bytes=sum(report.memory_bytes for report in reports if report.state == "loaded"),
        error=record.error,
    )


def _unread_card(spec: ModelSpec) -> ModelCard:
    """Return what is known of a model that was not fetched yet: hardly more than the entries it is offered as."""
    if spec.tensor is not None:
        rule = TensorRule(name=spec.tensor.name, version=spec.tensor.version, platform="", inputs=(), outputs=())
        return ModelCard(id=spec.id, kind="tensor", inputs=("tensor",), outputs=(), tensor=rule)
    profiles = {**known_profiles(spec.id), **spec.profiles}
    return ModelCard(id=spec.id, kind="encoder", revision=spec.revision, profiles=profiles)


def _state(record: Record, is_loaded: bool) -> ModelState:
    states = {report.state for report in record.reports.values()}
    if is_loaded and record.wanted:
        return "loaded"
    if "unloading" in states or (is_loaded and not record.wanted):
        return "unloading"
    if record.dismissed and not record.wanted and "loading" in states:  # it goes as soon as its load has ended
        return "unloading"
    if record.wanted or record.reloads or "loading" in states:
        return "loading"
    return "failed" if record.error is not None else "available"
