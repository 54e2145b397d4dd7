"""Serves the requests of the model repositories API: finds their models, and loads and unloads them.

A helper process reads the repositories. After the start, only this module adds models to the registry.
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
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.supervisor.loads import Loads
from sie.supervisor.models import ModelRegistry, Record
from sie.values.errors import BadRequest, Unavailable, WireError, to_wire

_log = get_logger(__name__)
_MOVING = frozenset(("loading", "unloading"))
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class Repositories:
    """The model repositories of one server."""

    def __init__(
        self, settings: Settings, registry: ModelRegistry, loads: Loads, preparer: Preparer, spawn: Spawn
    ) -> None:
        models = settings.models
        self._directories = tuple(str(Path(directory).absolute()) for directory in models.repositories)
        self._is_explicit = models.repository_control == "explicit"
        self._default_max_batch_size = models.default_max_batch_size
        self._probes_batching = models.probe_batching
        self._registry = registry
        self._loads = loads
        self._preparer = preparer
        self._spawn = spawn
        self._leaving: dict[str, set[str]] = {}
        """By model, the ids of versions to unload as soon as their successors are loaded."""
        self.is_reading = bool(self._directories)
        """Whether the first read of the repositories is in progress; readiness waits for it."""

    def bind(self, children: Children) -> None:
        """Set the children to answer."""
        self._children = children
        self._loads.bind_repositories(self._retire)

    def start(self) -> None:
        """Start to read the repositories."""
        if self._directories:
            self._spawn(self._read_all())

    def manage(self, child: Child, message: messages.ManageRepository) -> None:
        """Apply an administrator's request from a frontend, and answer it."""
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
        """Read all repositories again, then remove, reload and add models accordingly. New models start as at the
        start.
        """
        found = await self._preparer.find_models(self._directories) if self._directories else []
        if isinstance(found, WireError):
            self._answer(child, message, found)
            return
        names = {model.name for model in found}
        for record in self._records():
            if record.spec.tensor is not None and record.spec.tensor.name not in names:
                self._registry.release(record)  # the prepare helper may still be working on it
                self._leaving.pop(record.spec.tensor.name, None)
                self._loads.cancel_staged(record.spec.id)
                self._registry.remove(record.spec.id)
                self._children.send_all(self._children.workers, messages.Unload(record.spec.id))
        for model in found:
            if self._is_explicit and not any(record.wanted for record in self._records(model.name)):
                self._take(model)
            else:
                self._load_found(model)
        self._answer(child, message)

    def _load_found(self, model: RepositoryModel) -> None:
        """Load the versions that the policy selects, and reload those with changed files. Other versions are unloaded
        later.
        """
        before = {record.spec.id: record.spec for record in self._records(model.name)}
        records = self._take(model)
        kept = {record.spec.id for record in records}
        self._leaving[model.name] = before.keys() - kept
        for record in records:
            has_changed = before.get(record.spec.id, record.spec) != record.spec
            has_failed = record.is_stale and record.error is not None  # the loaded copy is from the old files
            self._loads.manage("reload" if (has_changed or has_failed) and record.wanted else "load", record.spec.id)
        self._retire()

    def _retire(self) -> None:
        """Unload the versions whose successors are loaded. If all successors failed, keep the old versions."""
        if not self._leaving:
            return
        states = {entry.card.id: entry.state for entry in self._registry.entries()}
        for name, leaving in list(self._leaving.items()):
            staying = [states[record.spec.id] for record in self._records(name) if record.spec.id not in leaving]
            if any(state in _MOVING for state in staying):
                continue
            del self._leaving[name]
            if "loaded" in staying or not staying:
                for model_id in leaving & states.keys():
                    self._loads.manage("unload", model_id)

    def _take(self, model: RepositoryModel) -> list[Record]:
        """Add a model's versions and return their records. A model without versions only has its reason logged."""
        if not model.versions:
            source = TensorSource(repository=model.repository, name=model.name, version="")
            record = self._add(ModelSpec(id=source.hosted_id, tensor=source))
            error = to_wire(BadRequest(model.reason, extras={"error_class": "CONFIG"}))
            if record is not None:
                self._registry.fail(record, error, time.monotonic())
            _log.error("%s", model.reason)
            return []
        self._forget_reason(model)
        specs = repository_specs(model, self._default_max_batch_size, probes_batching=self._probes_batching)
        return [record for record in map(self._add, specs) if record is not None]

    def _add(self, spec: ModelSpec) -> Record | None:
        """Return the model's record with the new spec, or None if a model of the settings has this id."""
        record = self._registry.records.get(spec.id)
        if record is None:
            record = self._registry.add(spec, preload=False, card=None, is_pinned=True)
            record.preload, record.may_fail = not self._is_explicit and bool(spec.directory), True
        elif record.spec.tensor is None:
            _log.error("model repository: %s is the id of another model", spec.id)
            return None
        elif record.spec != spec:
            record.spec, record.is_stale = spec, True
        return record

    def _forget_reason(self, model: RepositoryModel) -> None:
        """Remove the error record of a model that has versions now."""
        self._registry.records.pop(TensorSource(repository="", name=model.name, version="").hosted_id, None)

    def _records(self, name: str | None = None) -> list[Record]:
        """Return the records of one model's versions, or of all models (None). An empty name matches no model."""
        return [
            record
            for record in self._registry.records.values()
            if record.spec.tensor is not None and name in (None, record.spec.tensor.name)
        ]

    def _answer(self, child: Child, message: messages.ManageRepository, error: WireError | None = None) -> None:
        self._children.send(child, self._loads.message())
        self._children.send(child, messages.Managed(message.number, error))


def _not_allowed() -> Unavailable:
    """Return Triton's error for its control modes other than explicit."""
    return Unavailable("explicit model load / unload is not allowed if polling is enabled", code="NOT_ALLOWED")
