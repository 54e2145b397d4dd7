"""Carries out what the model repositories ask for: finds their models, and loads and unloads them on request.

What is there is read by a helper process; only this file adds models to the book after the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from sie.catalog.spec import ModelSpec, RepositoryModel, TensorSource, repository_specs
from sie.config.settings import Settings
from sie.ipc import messages
from sie.runtime.logs import get_logger
from sie.supervisor.card_helper import Preparer
from sie.supervisor.children import Child
from sie.supervisor.crew import Crew
from sie.supervisor.loads import Loads
from sie.supervisor.models import ModelBook, Record
from sie.values.errors import BadRequest, Unavailable, WireError, to_wire

_log = get_logger(__name__)
_MOVING = frozenset(("loading", "unloading"))
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Repositories:
    """The model repositories of one server, in the book of its models."""

    def __init__(self, settings: Settings, book: ModelBook, loads: Loads, preparer: Preparer, spawn: Spawn) -> None:
        models = settings.models
        self._directories = tuple(str(Path(directory).absolute()) for directory in models.repositories)
        self._is_explicit = models.repository_control == "explicit"
        self._default_max_batch_size = models.default_max_batch_size
        self._probes_batching = models.probe_batching
        self._book = book
        self._loads = loads
        self._preparer = preparer
        self._spawn = spawn
        self._leaving: dict[str, set[str]] = {}
        """By model the ids of versions that go as soon as those that take their place are there."""
        self.is_reading = bool(self._directories)
        """Whether it is not known yet what there is: readiness waits."""

    def bind(self, crew: Crew) -> None:
        """Say whom to answer."""
        self._crew = crew
        self._loads.bind_repositories(self._retire)

    def start(self) -> None:
        """Begin to read the repositories."""
        if self._directories:
            self._spawn(self._read_all())

    def manage(self, child: Child, message: messages.ManageRepository) -> None:
        """Do what an administrator asked for through a frontend, and answer it."""
        if message.action == "reload":
            self._spawn(self._reload(child, message))
        elif not self._is_explicit:
            self._answer(child, message, to_wire(_not_allowed()))
        elif message.action == "unload":
            self._leaving.pop(message.name, None)
            for record in self._records(message.name):
                self._loads.manage("unload", record.spec.id)
            self._answer(child, message)
        else:
            self._spawn(self._load(child, message))

    async def _read_all(self) -> None:
        found = await self._preparer.find_models(self._directories)
        self.is_reading = False
        if isinstance(found, WireError):
            _log.error("%s", found.message)
        else:
            for model in found:
                for record in self._take(model):
                    if not self._is_explicit:
                        self._loads.load(record)
        self._loads.broadcast()

    async def _load(self, child: Child, message: messages.ManageRepository) -> None:
        is_asked_for = self._directories and message.name  # an empty name would mean all models
        found = await self._preparer.find_models(self._directories, message.name) if is_asked_for else []
        if isinstance(found, WireError):
            self._answer(child, message, found)
        elif not found:
            text = f"failed to load '{message.name}', failed to poll from model repository"
            self._answer(child, message, to_wire(BadRequest(text, code="MODEL_NOT_FOUND")))
        else:
            self._load_found(found[0])
            self._answer(child, message)

    async def _reload(self, child: Child, message: messages.ManageRepository) -> None:
        """Read everything anew: what is gone goes, what has changed is loaded again, what is new as at the start."""
        found = await self._preparer.find_models(self._directories) if self._directories else []
        if isinstance(found, WireError):
            self._answer(child, message, found)
            return
        names = {model.name for model in found}
        for record in self._records():
            if record.spec.tensor is not None and record.spec.tensor.name not in names:
                self._book.release(record)  # it may still be on its way through the prepare helper
                self._leaving.pop(record.spec.tensor.name, None)
                self._loads.call_off(record.spec.id)
                self._book.remove(record.spec.id)
                self._crew.send_all(self._crew.workers, messages.Unload(record.spec.id))
        for model in found:
            if self._is_explicit and not any(record.wanted for record in self._records(model.name)):
                self._take(model)
            else:
                self._load_found(model)
        self._answer(child, message)

    def _load_found(self, model: RepositoryModel) -> None:
        """Load the versions that the policy names now, those again whose files have changed; all others go after that."""
        before = {record.spec.id: record.spec for record in self._records(model.name)}
        records = self._take(model)
        kept = {record.spec.id for record in records}
        self._leaving[model.name] = before.keys() - kept
        for record in records:
            has_changed = before.get(record.spec.id, record.spec) != record.spec
            has_failed = record.is_stale and record.error is not None  # what is loaded is from before
            self._loads.manage("reload" if (has_changed or has_failed) and record.wanted else "load", record.spec.id)
        self._retire()

    def _retire(self) -> None:
        """Unload the versions whose successors have come; where all of these failed, the model stays what it was."""
        if not self._leaving:
            return
        states = {entry.card.id: entry.state for entry in self._book.entries()}
        for name, leaving in list(self._leaving.items()):
            staying = [states[record.spec.id] for record in self._records(name) if record.spec.id not in leaving]
            if any(state in _MOVING for state in staying):
                continue
            del self._leaving[name]
            if "loaded" in staying or not staying:
                for model_id in leaving & states.keys():
                    self._loads.manage("unload", model_id)

    def _take(self, model: RepositoryModel) -> list[Record]:
        """Make a model's versions known and return their records; one without versions only has its reason told."""
        if not model.versions:
            source = TensorSource(repository=model.repository, name=model.name, version="")
            record = self._add(ModelSpec(id=source.hosted_id, tensor=source))
            error = to_wire(BadRequest(model.reason, extras={"error_class": "CONFIG"}))
            if record is not None:
                self._book.fail(record, error, time.monotonic())
            _log.error("%s", model.reason)
            return []
        self._forget_reason(model)
        specs = repository_specs(model, self._default_max_batch_size, probes_batching=self._probes_batching)
        return [record for record in map(self._add, specs) if record is not None]

    def _add(self, spec: ModelSpec) -> Record | None:
        """Return the model's record, with this spec from now on; None for an id that settings have given away."""
        record = self._book.records.get(spec.id)
        if record is None:
            record = self._book.add(spec, preload=False, card=None, is_pinned=True)
            record.preload, record.may_fail = not self._is_explicit and bool(spec.directory), True
        elif record.spec.tensor is None:
            _log.error("model repository: %s is the id of another model", spec.id)
            return None
        elif record.spec != spec:
            record.spec, record.is_stale = spec, True
        return record

    def _forget_reason(self, model: RepositoryModel) -> None:
        """The model has versions now."""
        self._book.records.pop(TensorSource(repository="", name=model.name, version="").hosted_id, None)

    def _records(self, name: str | None = None) -> list[Record]:
        """Return the records of one model's versions, or of all models; a client's empty name is no model's."""
        return [
            record
            for record in self._book.records.values()
            if record.spec.tensor is not None and name in (None, record.spec.tensor.name)
        ]

    def _answer(self, child: Child, message: messages.ManageRepository, error: WireError | None = None) -> None:
        self._crew.send(child, self._loads.message())
        self._crew.send(child, messages.Managed(message.number, error))


def _not_allowed() -> Unavailable:
    """Return Triton's answer in its modes other than explicit."""
    return Unavailable("explicit model load / unload is not allowed if polling is enabled", code="NOT_ALLOWED")
