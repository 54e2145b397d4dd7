"""Serves the requests of the model repositories API: finds their models, and loads and unloads them.

A helper process reads the repositories. After the start, only this module adds models to the registry.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from sie.catalog.spec import ModelSpec, RepositoryModel, TensorSource, repository_specs
from sie.config.settings import Settings
from sie.ipc import messages
from sie.runtime.logs import get_logger
from sie.supervisor.card_helper import Preparer
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.supervisor.loads import Loads
from sie.supervisor.model_registry import ModelRegistry, Record
from sie.supervisor.state_broadcast import StateBroadcast
from sie.values.errors import BadRequest, SieError, Unavailable, WireError, from_wire, not_loaded, to_wire

_log = get_logger(__name__)
_MOVING = frozenset(("loading", "unloading"))
Spawn = Callable[[Coroutine[Any, Any, None]], None]


class _Begun(msgspec.Struct):
    """The models that an action changes; fields as in `Managed`."""

    models: list[str] = []
    has_changed: bool = False


class Repositories:
    """The model repositories of one server."""

    def __init__(
        self,
        settings: Settings,
        registry: ModelRegistry,
        children: Children,
        state: StateBroadcast,
        loads: Loads,
        *,
        preparer: Preparer,
        spawn: Spawn,
    ) -> None:
        models = settings.models
        self._directories = tuple(str(Path(directory).absolute()) for directory in models.repositories)
        self._is_explicit = models.repository_control == "explicit"
        self._default_max_batch_size = models.default_max_batch_size
        self._probes_batching = models.probe_batching
        self._registry = registry
        self._children = children
        self._state = state
        self._loads = loads
        self._preparer = preparer
        self._spawn = spawn
        self._leaving: dict[str, set[str]] = {}
        """By model, the ids of versions to unload as soon as their successors are loaded."""
        self._turn = asyncio.Lock()
        """Held while a request reads the repositories and is applied, so that a late answer never undoes a newer one."""
        self.is_reading = bool(self._directories)
        """Whether the first read of the repositories is in progress; readiness waits for it."""
        loads.bind_repositories(self._retire)

    def start(self) -> None:
        """Start to read the repositories."""
        if self._directories:
            self._spawn(self._read_all())

    def manage(self, child: Child, message: messages.ManageRepository) -> None:
        """Apply an administrator's request from a frontend, and answer it. Requests take effect in their order."""
        self._spawn(self._manage(child, message))

    async def _manage(self, child: Child, message: messages.ManageRepository) -> None:
        async with self._turn:
            try:
                begun = await self._begin(message)
            except SieError as error:
                answer = messages.Managed(message.number, to_wire(error))
            else:
                answer = messages.Managed(message.number, None, tuple(begun.models), begun.has_changed)
            self._children.send(child, self._state.message())
            self._children.send(child, answer)

    async def _begin(self, message: messages.ManageRepository) -> _Begun:
        """Begin an action. Raises SieError if it cannot begin."""
        if message.action == "reload":
            return self._reload(await self._find())
        if not self._is_explicit:
            raise _not_allowed()
        if message.action == "unload":
            self._leaving.pop(message.name, None)
            for record in self._records(message.name):
                self._loads.manage("unload", record.spec.id)
            return _Begun()
        found = await self._find(message.name) if message.name else []  # an empty name would mean all models
        if not found:
            text = f"failed to load '{message.name}', failed to poll from model repository"
            raise BadRequest(text, code="MODEL_NOT_FOUND")
        return self._load(found[0])

    async def _find(self, only: str = "") -> list[RepositoryModel]:
        """Return the models of the repositories. Raises SieError."""
        found = await self._preparer.find_models(self._directories, only) if self._directories else []
        if isinstance(found, WireError):
            raise from_wire(found)
        return found

    async def _read_all(self) -> None:
        async with self._turn:
            try:
                found = await self._find()
            except SieError as error:
                _log.error("%s", error.message)
                found = []
            self.is_reading = False
            for model in found:
                for record in self._take(model):
                    if not self._is_explicit:
                        self._loads.load(record)
        self._state.broadcast()

    def _reload(self, found: list[RepositoryModel]) -> _Begun:
        """Remove, reload and add models as the repositories have them now. New models start as at the start."""
        begun = _Begun()
        names = {model.name for model in found}
        for record in self._records():
            if record.spec.tensor is not None and record.spec.tensor.name not in names:
                begun.has_changed = True
                self._registry.release(record)  # the prepare helper may still be working on it
                self._leaving.pop(record.spec.tensor.name, None)
                self._loads.cancel_staged(record.spec.id)
                self._registry.remove(record.spec.id)
                self._children.send_all(self._children.workers, messages.Unload(record.spec.id))
        for model in found:
            if self._is_explicit and not any(record.wanted for record in self._records(model.name)):
                self._take(model)
            else:
                one = self._load(model)
                begun.models += one.models
                begun.has_changed |= one.has_changed
        return begun

    def _load(self, model: RepositoryModel) -> _Begun:
        """Load the versions that the policy selects, and reload those with changed files.

        Other versions are unloaded later. A model without a version to load stays as it is.
        """
        before = {record.spec.id: record.spec for record in self._records(model.name)}
        records = self._take(model)
        if not records:
            return _Begun([_unversioned(model).hosted_id])
        self._leaving[model.name] = before.keys() - {record.spec.id for record in records}
        begun = _Begun([record.spec.id for record in records])
        for record in records:
            has_changed = before.get(record.spec.id, record.spec) != record.spec
            has_failed = record.is_stale and record.error is not None  # the loaded copy is from the old files
            is_reload = (has_changed or has_failed) and record.wanted
            begun.has_changed |= is_reload or not record.wanted
            self._loads.manage("reload" if is_reload else "load", record.spec.id)
        self._retire()
        return begun

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
        """Add a model's versions and return their records. A model without versions only has its reason recorded."""
        specs = repository_specs(model, self._default_max_batch_size, probes_batching=self._probes_batching)
        foreign = next((spec.id for spec in specs if self._is_foreign(spec.id)), None)
        if foreign is not None:
            reason = not_loaded(model.name, f"{foreign} is the id of another model")
            model, specs = msgspec.structs.replace(model, reason=reason), []
        if not specs:
            self._refuse(model)
            return []
        self._registry.records.pop(_unversioned(model).hosted_id, None)  # an earlier reason
        return [self._add(spec) for spec in specs]

    def _is_foreign(self, model_id: str) -> bool:
        """Return whether this is the id of a model that is not a repository's."""
        record = self._registry.records.get(model_id)
        return record is not None and record.spec.tensor is None

    def _refuse(self, model: RepositoryModel) -> None:
        """Record why a model has no version to serve. Serving versions stay, and report the reason, too."""
        source = _unversioned(model)
        error = to_wire(BadRequest(model.reason, extras={"error_class": "CONFIG"}))
        _log.error("%s", model.reason)
        if not self._is_foreign(source.hosted_id):
            self._registry.fail(self._add(ModelSpec(id=source.hosted_id, tensor=source)), error, time.monotonic())
        for serving in self._records(model.name):
            if serving.wanted and serving.loaded_on:
                serving.is_stale = True
                self._loads.keep(serving, error)

    def _add(self, spec: ModelSpec) -> Record:
        """Return the model's record with the new spec."""
        record = self._registry.records.get(spec.id)
        if record is None:
            record = self._registry.add(spec, preload=False, card=None, is_pinned=True)
            record.preload, record.may_fail = not self._is_explicit and bool(spec.directory), True
        elif record.spec != spec:
            record.spec, record.is_stale = spec, True
        return record

    def _records(self, name: str | None = None) -> list[Record]:
        """Return the records of one model's versions, or of all models (None). An empty name matches no model."""
        return [
            record
            for record in self._registry.records.values()
            if record.spec.tensor is not None and name in (None, record.spec.tensor.name)
        ]


def _unversioned(model: RepositoryModel) -> TensorSource:
    """Return the source that stands for a model without a version to serve."""
    return TensorSource(repository=model.repository, name=model.name, version="")


def _not_allowed() -> Unavailable:
    """Return Triton's error for its control modes other than explicit."""
    return Unavailable("explicit model load / unload is not allowed if polling is enabled", code="NOT_ALLOWED")
