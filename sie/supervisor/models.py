"""Keeps the state of each model and decides when to load and unload it.

Sends nothing itself: the server sends the messages. Times are seconds on a monotonic clock, passed in.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sie.catalog.profiles import known_profiles
from sie.catalog.spec import ModelSpec
from sie.ipc.messages import ModelEntry, ModelReport
from sie.values.card import ModelCard, ModelState
from sie.values.errors import Internal, WireError, to_wire, without_paths
from sie.values.tensor import TensorRule

_MAX_REASON = 300
"""Characters of a reason in the line that says why the server is not ready."""
_MAX_RETRY_S = 1800.0
_PERMANENT_ATTEMPTS = 8
_PERMANENT_CLASSES = frozenset({"GATED", "NOT_FOUND", "DEPENDENCY", "CONFIG"})
_COOL_DOWNS = {"OOM": 2, "STORAGE": 2, "UNKNOWN": 20}
"""The first cool-down of each error class, as a multiple of load_retry_s; 1 for all others."""
# SIE API reference, section 12: 60, 60, 600 and 30 s; doubled with each attempt up to 1,800 s; at most eight attempts.


class Record(msgspec.Struct):
    """One model. card is None until a hub model is fetched; wanted means that workers should have it loaded.

    is_pinned: only an explicit unload removes it. dismissed: an explicit unload removed it, and readiness does not wait
    for it until the next load. reloads: it will load again once it is unloaded everywhere. is_stale: the next load
    reads its files again. waits_for_memory: its load waits for memory and has not been sent to workers. asked: slots of
    workers that were sent the load and have not answered. is_released: it was unloaded and not wanted since, so a late
    report does not bring it back. reloading: it was loaded when a reload began that has not ended. may_fail: readiness
    stops waiting for it after a failed load.
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
    waits_for_memory: bool = False
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
        """Return whether a worker has it or will soon have it."""
        report = self.reports.get(slot)
        return slot in self.asked or (report is not None and report.state != "failed")

    def is_moving(self, slot: int) -> bool:
        """Return whether a worker is loading or unloading it."""
        report = self.reports.get(slot)
        return slot in self.asked or (
            report is not None
            and (report.state in ("loading", "unloading") or (report.state == "loaded" and not self.wanted))
        )


class ModelRegistry:
    """Every model of this server, in the order of the settings."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self.records: dict[str, Record] = {}

    def add(self, spec: ModelSpec, preload: bool, card: ModelCard | None, *, is_pinned: bool = False) -> Record:
        """Add a model. A model that loads before readiness is pinned, too."""
        record = self.records[spec.id] = Record(spec, preload, card, is_pinned or preload, wanted=preload)
        return record

    def remove(self, model: str) -> None:
        """Remove a model."""
        del self.records[model]

    def set_retry(self, retry_s: float) -> None:
        """Change the wait after a failed load. Running cool-downs stay as they are."""
        self._retry_s = retry_s

    def want(self, model: str, now_s: float) -> Record | None:
        """Record a request for a model. Return its record if a load must start now, else None."""
        record = self.records.get(model)
        if record is None:
            return None
        record.last_used_s = now_s
        if record.wanted or record.reloads or now_s < record.retry_at_s or record.spec.tensor is not None:
            return None  # only administrators load models of a repository
        self._start_to_want(record)
        record.error = None
        return record

    def demand(self, record: Record, now_s: float) -> bool:
        """Record an administrator's load, for which earlier failures do not count. Return whether it starts now."""
        record.last_used_s = now_s
        if record.wanted or record.reloads:
            return False
        self._start_to_want(record)
        self._forgive(record)
        return True

    def dismiss(self, record: Record) -> None:
        """Record an administrator's unload."""
        self.release(record)
        self._forgive(record)
        record.reloads, record.reloading, record.dismissed = False, False, True

    def reload(self, record: Record, now_s: float) -> bool:
        """Record an administrator's reload. Return whether the model must be unloaded first."""
        record.is_stale = record.spec.directory is not None
        record.last_used_s = now_s
        self._forgive(record)
        record.reloading = record.reloading or bool(record.loaded_on)
        self.release(record)
        record.reloads = True
        return _is_moving(record)

    def renew(self, record: Record, now_s: float) -> bool:
        """Record a reload beside the serving model. Return False if no loaded copy could serve meanwhile."""
        if not (record.wanted and record.loaded_on):
            return False
        record.is_stale = record.reloading = True
        record.last_used_s = now_s
        self._forgive(record)
        return True

    def due_reloads(self) -> list[Record]:
        """Return the models to load again that are unloaded everywhere, now marked as wanted."""
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
        """Return the failed models that readiness waits for and whose cool-down is over, now marked as wanted.

        Without this, a server with one failed load would wait for requests that its own unreadiness keeps away.
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
        """Mark these models as used now."""
        for model in models:
            if model in self.records:
                self.records[model].last_used_s = now_s

    def report(self, slot: int, report: ModelReport, now_s: float) -> None:
        """Record a worker's report on one of its models."""
        record = self.records.get(report.model)
        if record is None:
            return
        if report.state not in ("unloading", "available"):  # those may answer a message sent before the load
            record.asked.discard(slot)
        if report.state != "loading":
            record.loading_since_s.pop(slot, None)
        elif report.progress is not None:  # a worker loads one model at a time; a model without progress still waits
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
            self.fail(record, report.error, now_s)  # one attempt for all workers together

    def fail(self, record: Record, error: WireError, now_s: float) -> None:
        """Record a failed load and the time of its next try. Workers that have the model keep serving it."""
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
        record.preparing = record.waits_for_memory = record.reloading = False
        if not record.loaded_on:
            record.wanted = record.was_loaded = False

    def forget_worker(self, slot: int, now_s: float, *, blame: bool) -> None:
        """Forget the models of a dead worker; with blame, its running load counts as failed.

        Otherwise a checkpoint whose load kills its worker would load again and again, and each time take down the
        worker's other models.
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

    def release(self, record: Record) -> None:
        """Stop wanting a model that is about to be unloaded."""
        record.wanted = record.was_loaded = record.waits_for_memory = False
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

    def missing_reasons(self) -> str:
        """Return the models that readiness still waits for, each with the reason, or an empty text."""
        return ", ".join(f"{name} ({_why_missing(self.records[name])})" for name in self.missing())

    def entries(self) -> tuple[ModelEntry, ...]:
        """Return all models for frontends."""
        return tuple(_entry(record) for record in self.records.values())


def _why_missing(record: Record) -> str:
    """Return why a model is not loaded, as anybody may read it: in one line, and without the server's paths."""
    if record.error is not None:
        return f"failed: {' '.join(without_paths(record.error).message.split())}"[:_MAX_REASON]
    return "waits for memory" if record.waits_for_memory else _state(record, is_loaded=False)


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
    """Return a placeholder card for a model that was not fetched yet: its id, and the profiles it is offered as."""
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
    if record.dismissed and not record.wanted and "loading" in states:  # it is unloaded as soon as its load has ended
        return "unloading"
    if record.wanted or record.reloads or "loading" in states:
        return "loading"
    return "failed" if record.error is not None else "available"
