"""Owns models that are loaded anew beside what serves: their files changed, and nobody is to notice when these are bad.

The successor is prepared, then staged on each worker that has the model. Only once it stands everywhere does the model
go and come back, which takes no load then. One that cannot be prepared or staged leaves the model as it is, whose files
may be gone by now, with the reason.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from sie.ipc import messages
from sie.supervisor.card_helper import Preparer, failed
from sie.supervisor.children import Child
from sie.supervisor.crew import Crew
from sie.supervisor.models import Record
from sie.values.card import ModelCard
from sie.values.errors import WireError


class _Succession(msgspec.Struct):
    """One successor on its way. pending: the slots of the workers that still load it, since since_s."""

    record: Record
    number: int
    card: ModelCard | None = None
    pending: set[int] = set()
    since_s: float = 0.0


class Successions:
    """All successors of one server's models, by the model's id."""

    def __init__(
        self,
        crew: Crew,
        preparer: Preparer,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        *,
        on_standing: Callable[[Record], None],
        on_failed: Callable[[Record, WireError], None],
    ) -> None:
        """on_standing: nothing but the change-over is left, and `take` has the card; on_failed: it will not come."""
        self._crew = crew
        self._preparer = preparer
        self._spawn = spawn
        self._on_standing = on_standing
        self._on_failed = on_failed
        self._numbers = itertools.count(1)
        self._open: dict[str, _Succession] = {}
        self._standing: dict[str, ModelCard] = {}

    def begin(self, record: Record) -> None:
        """Prepare and stage a successor of a loaded model from its files as they are now, in place of an earlier one."""
        self.call_off(record.spec.id)
        succession = self._open[record.spec.id] = _Succession(record, next(self._numbers))
        self._spawn(self._prepare(succession))

    def is_under_way(self, model: str) -> bool:
        """Return whether a successor of this model is on its way, or stands and was not taken."""
        return model in self._open or model in self._standing

    def call_off(self, model: str) -> None:
        """Give up a successor, if there is one; workers let go what they have of it."""
        succession = self._open.pop(model, None)
        is_standing = self._standing.pop(model, None) is not None
        if is_standing or (succession is not None and succession.card is not None):
            self._crew.send_all(self._crew.workers, messages.Unstage(model))

    def take(self, model: str) -> ModelCard | None:
        """Return the card of a successor that stands, once; None where there is none."""
        return self._standing.pop(model, None)

    def on_staged(self, worker: Child, message: messages.Staged) -> None:
        """Take a worker's word that a successor stands there, or does not."""
        succession = self._open.get(message.model)
        if succession is None or succession.number != message.number:
            return
        succession.pending.discard(worker.slot)
        if message.error is not None:
            self._fail(succession, message.error)
        elif not succession.pending:
            self._stand(succession)

    def forget_worker(self, slot: int, *, blame: bool) -> None:
        """Go on without a dead worker; blame: the death may be the doing of a load, and then of this one."""
        for succession in [each for each in self._open.values() if slot in each.pending]:
            succession.pending.discard(slot)
            if blame:
                self._fail(succession, failed(succession.record.spec, "the worker died while it loaded", "ENGINE"))
            elif not succession.pending:
                self._stand(succession)

    def end_overdue(self, timeout_s: float, now_s: float) -> None:
        """Give up what takes longer than timeout_s; the worker goes with it, since nothing less ends a load's thread."""
        for succession in list(self._open.values()):
            if succession.pending and now_s - succession.since_s > timeout_s:
                reason = f"not loaded within load_timeout_s ({timeout_s:g} s)"
                slots = succession.pending
                self._fail(succession, failed(succession.record.spec, reason, "TIMEOUT"))
                for slot in slots:
                    self._crew.workers[slot].kill()

    async def _prepare(self, succession: _Succession) -> None:
        record = succession.record
        prepared = await self._preparer.prepare(record.spec)
        if self._open.get(record.spec.id) is not succession:  # something else was asked for meanwhile
            return
        if isinstance(prepared, WireError):
            self._fail(succession, prepared)
            return
        workers = [self._crew.workers[slot] for slot in record.loaded_on]
        succession.card, succession.since_s = prepared, time.monotonic()
        succession.pending = {worker.slot for worker in workers}
        self._crew.send_all(workers, messages.Stage(succession.number, prepared))
        if not workers:  # they died meanwhile, and nothing is left that could go on serving
            self._stand(succession)

    def _stand(self, succession: _Succession) -> None:
        assert succession.card is not None
        model = succession.record.spec.id
        del self._open[model]
        self._standing[model] = succession.card
        self._on_standing(succession.record)

    def _fail(self, succession: _Succession, error: WireError) -> None:
        self.call_off(succession.record.spec.id)
        self._on_failed(succession.record, error)
