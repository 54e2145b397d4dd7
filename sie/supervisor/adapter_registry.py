"""Keeps the state of each declared adapter and decides which ones to load and unload.

Sends nothing itself: `adapter_loads` sends the messages. Times are seconds on a monotonic clock, passed in. Last use is
a counter, not a time: the most recently used adapter has the highest number.
"""

from __future__ import annotations

import itertools
from collections.abc import Container

import msgspec

from sie.ipc.messages import AdapterEntry, AdapterReport
from sie.supervisor.lifecycle import Event, LifeStage, Place, loaded_slots, next_place, next_stage
from sie.values.card import AdapterSpec, ModelState
from sie.values.errors import Internal, WireError, to_wire

_MAX_RETRY_S = 1800.0
"""The longest cool-down. It doubles with each attempt, as for models. Source: SIE API reference, section 12."""


class AdapterRecord(msgspec.Struct):
    """One adapter. directory is empty until a hub adapter is fetched. preparing: a helper fetches it.

    `sie.supervisor.lifecycle` explains stage and places. A model that is loaded again brings its adapters back, so an
    adapter is never reloaded.
    """

    spec: AdapterSpec
    directory: str = ""
    stage: LifeStage = LifeStage.IDLE
    places: dict[int, Place] = {}
    preparing: bool = False
    error: WireError | None = None
    num_attempts: int = 0
    retry_at_s: float = 0.0
    wanted_since_s: float = 0.0
    last_used: int = 0

    @property
    def is_on_disk(self) -> bool:
        """Whether its files are on this machine, or it needs none."""
        return bool(self.directory) or self.spec.stub is not None

    @property
    def loaded_on(self) -> tuple[int, ...]:
        """The slots of the workers that have it, ascending."""
        return loaded_slots(self.places)

    @property
    def wanted(self) -> bool:
        """Whether workers should have it."""
        return self.stage.is_wanted

    def apply(self, event: Event) -> None:
        """Change the stage as the table says."""
        self.stage = next_stage(self.stage, event)


class AdapterRegistry:
    """Every declared adapter of this server, by model and id."""

    def __init__(self, specs: list[AdapterSpec], max_loras: int, retry_s: float) -> None:
        self._max_loras = max_loras
        self._retry_s = retry_s
        self._uses = itertools.count(1)
        self._by_model: dict[str, dict[str, AdapterRecord]] = {}
        for spec in specs:
            self._by_model.setdefault(spec.model, {})[spec.id] = AdapterRecord(spec, spec.directory or "")

    def set_retry(self, retry_s: float) -> None:
        """Change the wait after a failed load. Running cool-downs stay as they are."""
        self._retry_s = retry_s

    def wanted_of(self, model: str) -> list[AdapterRecord]:
        """Return the adapters that a worker with this model should have."""
        return [record for record in self._records(model) if record.wanted]

    def want(self, model: str, adapter: str, now_s: float) -> AdapterRecord | None:
        """Record a request for an adapter. Return its record if a load must start now, else None."""
        record = self._by_model.get(model, {}).get(adapter)
        if record is None:
            return None
        record.last_used = next(self._uses)
        if record.wanted or now_s < record.retry_at_s:
            return None
        record.apply(Event.WANT)
        record.error, record.wanted_since_s = None, now_s
        return record

    def touch(self, used: tuple[tuple[str, str], ...]) -> None:
        """Mark (model, adapter) pairs as used, the last one most recently."""
        for model, adapter in used:
            record = self._by_model.get(model, {}).get(adapter)
            if record is not None:
                record.last_used = next(self._uses)

    def report(self, slot: int, report: AdapterReport, now_s: float) -> list[AdapterRecord]:
        """Record a worker's report on one adapter. Return the adapters that workers must unload now.

        Adapters are evicted only after a load succeeds, so a failed load costs no other adapter its place.
        """
        record = self._by_model.get(report.model, {}).get(report.adapter)
        if record is None:
            return []
        record.places[slot] = next_place(record.places.get(slot, Place.ABSENT), report.state)
        if report.state == "loaded":
            record.num_attempts = 0
            if not record.wanted:
                return [record]
            record.apply(Event.LOADED)
            return self._make_room(report.model)
        if report.state == "failed" and report.error is not None and not _is_somewhere(record):
            self.fail(record, report.error, now_s)
        return []

    def _make_room(self, model: str) -> list[AdapterRecord]:
        """Stop wanting the least recently used loaded adapters over max_loras, and return them."""
        loaded = sorted(
            (record for record in self.wanted_of(model) if record.loaded_on), key=lambda record: record.last_used
        )
        over = loaded[: max(0, len(loaded) - self._max_loras)]
        for record in over:
            record.apply(Event.RELEASE)
        return over

    def fail(self, record: AdapterRecord, error: WireError, now_s: float) -> None:
        """Record a failed load and the time when a request may start it again."""
        record.num_attempts += 1
        record.retry_at_s = now_s + min(self._retry_s * 2 ** (record.num_attempts - 1), _MAX_RETRY_S)
        record.error = error
        record.apply(Event.FAIL)

    def overdue(self, timeout_s: float, now_s: float, hosted: Container[str]) -> list[AdapterRecord]:
        """Fail the adapters that no worker has loaded within timeout_s, and return them.

        hosted are the models that a worker has. An adapter's time starts only when its model is loaded.
        """
        late: list[AdapterRecord] = []
        for model in self._by_model:
            for record in self.wanted_of(model):
                if model not in hosted and not record.preparing:
                    record.wanted_since_s = now_s
                elif not record.loaded_on and now_s - record.wanted_since_s > timeout_s:
                    late.append(record)
        for record in late:
            reason = f"Adapter '{record.spec.id}' cannot be loaded: not loaded within load_timeout_s ({timeout_s:g} s)"
            self.fail(record, to_wire(Internal(reason)), now_s)
        return late

    def forget(self, slot: int, model: str | None, now_s: float, *, is_kept: bool) -> None:
        """Forget a worker's adapters, of one model or (None) of all.

        is_kept: the model comes back there or is loaded elsewhere, so its adapters stay wanted.
        """
        for name in self._by_model if model is None else [model]:
            for record in self._records(name):
                record.places.pop(slot, None)
                if record.wanted and not is_kept:
                    record.apply(Event.RELEASE)
                record.wanted_since_s = now_s  # its time restarts with the model's

    def entries(self, model: str) -> dict[str, AdapterEntry]:
        """Return the adapters of a model for frontends, in declaration order."""
        return {
            record.spec.id: AdapterEntry(
                state=_state(record),
                workers=record.loaded_on if record.wanted else (),
                error=record.error,
                recovering=record.stage is LifeStage.SERVING and not record.loaded_on,
            )
            for record in self._records(model)
        }

    def _records(self, model: str) -> list[AdapterRecord]:
        return list(self._by_model.get(model, {}).values())


def _is_somewhere(record: AdapterRecord) -> bool:
    return any(place in (Place.LOADING, Place.LOADED) for place in record.places.values())


def _state(record: AdapterRecord) -> ModelState:
    if record.wanted:
        return "loaded" if record.loaded_on else "loading"
    return "failed" if record.error is not None else "available"
