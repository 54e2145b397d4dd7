"""Loads a changed model beside the copy that serves, so that bad new files harm no request.

The successor is prepared, then staged on each worker that has the model. Once it is staged everywhere, the model is
unloaded and loaded again, which then takes no load time. If the successor cannot be prepared or staged, the old model
keeps serving, even if its files are gone, and the error is reported.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec

from sie.ipc import messages
from sie.supervisor.card_helper import Preparer, failed
from sie.supervisor.child import Child
from sie.supervisor.children import Children
from sie.supervisor.model_registry import Record
from sie.values.card import ModelCard
from sie.values.errors import WireError


class _StagedReload(msgspec.Struct):
    """One staged reload. pending: slots of the workers that still load it, since since_s."""

    record: Record
    number: int
    card: ModelCard | None = None
    pending: set[int] = set()
    since_s: float = 0.0


class StagedReloads:
    """All staged reloads of one server, by model id."""

    def __init__(
        self,
        children: Children,
        preparer: Preparer,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        rooms_of: Callable[[Record, Collection[int]], dict[int, messages.CacheRoom]],
        *,
        on_complete: Callable[[Record], None],
        on_failed: Callable[[Record, WireError], None],
    ) -> None:
        """on_complete is called when every worker has staged the model; `take` then returns the card to switch to."""
        self._children = children
        self._preparer = preparer
        self._spawn = spawn
        self._rooms_of = rooms_of
        self._on_complete = on_complete
        self._on_failed = on_failed
        self._numbers = itertools.count(1)
        self._open: dict[str, _StagedReload] = {}
        self._complete: dict[str, ModelCard] = {}

    def begin(self, record: Record) -> None:
        """Prepare and stage a loaded model's successor from its current files. An earlier one is cancelled."""
        self.cancel(record.spec.id)
        reload = self._open[record.spec.id] = _StagedReload(record, next(self._numbers))
        self._spawn(self._prepare(reload))

    def is_under_way(self, model: str) -> bool:
        """Return whether a staged reload of this model is in progress, or complete and not taken."""
        return model in self._open or model in self._complete

    def cancel(self, model: str) -> None:
        """Cancel a model's staged reload, if there is one. Workers drop their copies of it."""
        reload = self._open.pop(model, None)
        is_complete = self._complete.pop(model, None) is not None
        if is_complete or (reload is not None and reload.card is not None):
            self._children.send_all(self._children.workers, messages.Unstage(model))

    def take(self, model: str) -> ModelCard | None:
        """Return and remove the card of a completely staged successor, or None."""
        return self._complete.pop(model, None)

    def on_staged(self, worker: Child, message: messages.Staged) -> None:
        """Record a worker's report that a successor is staged there, or has failed."""
        reload = self._open.get(message.model)
        if reload is None or reload.number != message.number:
            return
        reload.pending.discard(worker.slot)
        if message.error is not None:
            self._fail(reload, message.error)
        elif not reload.pending:
            self._mark_complete(reload)

    def forget_worker(self, slot: int, *, blame: bool) -> None:
        """Continue without a dead worker; blame: a load may have caused the death, so this one fails."""
        for reload in [each for each in self._open.values() if slot in each.pending]:
            reload.pending.discard(slot)
            if blame:
                self._fail(reload, failed(reload.record.spec, "the worker died while it loaded", "ENGINE"))
            elif not reload.pending:
                self._mark_complete(reload)

    def end_overdue(self, timeout_s: float, now_s: float) -> None:
        """Fail the staged reloads over timeout_s, and kill their workers: only that ends a load's thread."""
        for reload in list(self._open.values()):
            if reload.pending and now_s - reload.since_s > timeout_s:
                reason = f"not loaded within load_timeout_s ({timeout_s:g} s)"
                slots = reload.pending
                self._fail(reload, failed(reload.record.spec, reason, "TIMEOUT"))
                for slot in slots:
                    self._children.workers[slot].kill()

    async def _prepare(self, reload: _StagedReload) -> None:
        record = reload.record
        prepared = await self._preparer.prepare(record.spec)
        if self._open.get(record.spec.id) is not reload:  # another request replaced it meanwhile
            return
        if isinstance(prepared, WireError):
            self._fail(reload, prepared)
            return
        workers = [self._children.workers[slot] for slot in record.loaded_on]
        reload.card, reload.since_s = prepared, time.monotonic()
        reload.pending = {worker.slot for worker in workers}
        rooms = self._rooms_of(record, [worker.slot for worker in workers])
        for worker in workers:
            self._children.send(worker, messages.Stage(reload.number, prepared, rooms[worker.slot]))
        if not workers:  # all died meanwhile, so no old copy is left to serve
            self._mark_complete(reload)

    def _mark_complete(self, reload: _StagedReload) -> None:
        assert reload.card is not None
        model = reload.record.spec.id
        del self._open[model]
        self._complete[model] = reload.card
        self._on_complete(reload.record)

    def _fail(self, reload: _StagedReload, error: WireError) -> None:
        self.cancel(reload.record.spec.id)
        self._on_failed(reload.record, error)
