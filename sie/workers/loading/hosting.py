"""Loads and unloads the models of one worker; loads one at a time on a thread beside the step loop.

A model whose files changed may have a successor staged beside it. The successor is loaded, and comes into use with the
next `Load` of its card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from sie.catalog.files import refuse
from sie.ipc.messages import CacheRoom, Load, ModelReport, Stage, Staged, Unload, Unstage
from sie.runtime.logs import get_logger
from sie.values.card import ModelCard
from sie.values.errors import Internal, SieError, WireError, not_loaded, to_wire
from sie.values.fallbacks import Fallback
from sie.workers.device.fallbacks import collecting
from sie.workers.device.faults import DeviceLostError, is_device_lost, is_out_of_memory
from sie.workers.device.memory import free_model
from sie.workers.loading.load_queue import LoadQueue
from sie.workers.loading.states import LoadEvent, LoadState, next_state
from sie.workers.model_api import Runner

_log = get_logger(__name__)

Build = Callable[[ModelCard, Callable[[float, str], None], CacheRoom], Runner]
"""Returns a ready runner for a card, and reports (fraction, text) as progress; its keys and values get the room."""


class Hosted(msgspec.Struct, eq=False):
    """One model of this worker, or a successor staged beside it. runner is set exactly while it is loaded or unloading.

    `sie.workers.loading.states` explains state. number is that of the `Stage` for a successor, None for a model.
    """

    card: ModelCard
    number: int | None = None
    state: LoadState = LoadState.ABSENT
    runner: Runner | None = None
    fallbacks: tuple[Fallback, ...] = ()
    room: CacheRoom = CacheRoom()
    next: Load | None = None
    """What to load once this one is gone: the model was removed, and is wanted again with another definition."""


class _Ended(msgspec.Struct):
    """A finished load with its runner and fallbacks, or its error."""

    hosted: Hosted
    runner: Runner | None = None
    fallbacks: tuple[Fallback, ...] = ()
    error: WireError | None = None


class _Progress(NamedTuple):
    """How far a load is."""

    hosted: Hosted
    fraction: float
    text: str


class Host:
    """All models of this worker. Only the load itself happens outside the loop's thread."""

    def __init__(self, device: str, build: Build, send_report: Callable[[ModelReport | Staged], None]) -> None:
        self.device = device
        self._build = build
        self._send = send_report
        self._loads: LoadQueue[Hosted] = LoadQueue("load", self._load, self._failed)
        self.event_fd = self._loads.event_fd
        self._successors: dict[str, Hosted] = {}
        self.models: dict[str, Hosted] = {}

    def apply(self, message: Load | Unload | Stage | Unstage) -> None:
        """Apply a message of the supervisor."""
        match message:
            case Load(card, room):
                self.load(card, room)
            case Unload(model):
                self.start_unload(model)
            case Stage():
                self.stage(message)
            case Unstage(model):
                self.unstage(model)

    def stage(self, message: Stage) -> None:
        """Start loading a model's successor, in place of an earlier one; `Staged` reports the result."""
        self.unstage(message.card.id)
        successor = self._successors[message.card.id] = Hosted(message.card, message.number, room=message.room)
        self._change(successor, LoadEvent.LOAD)
        self._loads.add(successor)

    def unstage(self, model: str) -> None:
        """Drop a model's staged successor. A running load is dropped when it ends."""
        successor = self._successors.pop(model, None)
        if successor is not None:
            self._change(successor, LoadEvent.UNLOAD)
            if successor.state is LoadState.UNLOADING:  # it never took work
                self._free(successor, LoadEvent.FREE)

    def load(self, card: ModelCard, room: CacheRoom = CacheRoom()) -> None:  # noqa: B008  # immutable
        """Start loading a model, unless it is loading or loaded. An unloading model stays loaded if it has the same card.

        A successor staged with the same card is loaded at once.
        """
        hosted = self.models.setdefault(card.id, Hosted(card, room=room))
        is_leaving = hosted.state in (LoadState.UNLOADING, LoadState.CANCELLED)
        hosted.next = Load(card, room) if is_leaving and hosted.card != card else None
        if hosted.next is not None:
            return
        is_new = hosted.state.is_gone
        self._change(hosted, LoadEvent.LOAD)
        if not is_new:
            return
        staged = self._take_staged(card)
        if staged is None:
            self._loads.add(hosted)
        else:
            self._change(hosted, LoadEvent.START)
            self._loads.post(_Ended(hosted, staged.runner, staged.fallbacks))

    def _take_staged(self, card: ModelCard) -> Hosted | None:
        """Remove and return the staged successor of a model, or None if it is not loaded or was loaded from another card."""
        successor = self._successors.get(card.id)
        if successor is None or successor.state is not LoadState.LOADED:
            return None
        if successor.card != card:
            self.unstage(card.id)
            return None
        return self._successors.pop(card.id)

    def runner(self, model: str) -> Runner | None:
        """Return the runner that takes new work for a model, or None while it is not loaded."""
        hosted = self.models.get(model)
        return hosted.runner if hosted is not None and hosted.state is LoadState.LOADED else None

    def start_unload(self, model: str) -> None:
        """Take no new work for a model; `finish_unload` frees it once none of its items waits.

        A load that has not started is cancelled. A running load continues, and its result is dropped when it ends.
        """
        hosted = self.models.get(model)
        if hosted is not None:
            hosted.next = None
            self._change(hosted, LoadEvent.UNLOAD)

    @property
    def is_loading(self) -> bool:
        """Whether a load runs or waits."""
        return any(hosted.state.is_loading for hosted in (*self.models.values(), *self._successors.values()))

    def unloading(self) -> list[str]:
        """Return the models that `finish_unload` still has to free."""
        return [name for name, hosted in self.models.items() if hosted.state is LoadState.UNLOADING]

    def finish_unload(self, model: str) -> None:
        """Free a model."""
        self._free(self.models[model], LoadEvent.FREE)

    def collect(self) -> list[Hosted]:
        """Handle finished loads and forward progress. Return the newly loaded models.

        Raises DeviceLostError if a load found that this process has lost the device.
        """
        loaded: list[Hosted] = []
        for result in self._loads.collect():
            match result:
                case _Progress(hosted, fraction, text):
                    if hosted.number is None:
                        self._report(hosted, progress=fraction, detail=text)
                case _Ended(hosted):
                    self._finish_load(result)
                    if hosted.number is None and hosted.state is LoadState.LOADED:
                        loaded.append(hosted)
                case error:
                    raise error
        return loaded

    def _finish_load(self, ended: _Ended) -> None:
        hosted = ended.hosted
        is_wanted = hosted.state is LoadState.LOADING
        if not is_wanted:  # its end is the same with an error, which would be taken for that of the load that follows
            ended.runner = None
            self._free(hosted, LoadEvent.READY)
        elif ended.runner is None:
            self._change(hosted, LoadEvent.FAIL, ended.error)
        else:
            hosted.runner, ended.runner = ended.runner, None
            hosted.fallbacks = ended.fallbacks
            self._change(hosted, LoadEvent.READY)
        if is_wanted and hosted.number is not None:
            self._send(Staged(hosted.number, hosted.card.id, ended.error))

    def _free(self, hosted: Hosted, event: LoadEvent) -> None:
        """Free a model's memory with the event that ends it."""
        hosted.runner = None
        self._loads.join()
        free_model()
        self._change(hosted, event)

    def _change(self, hosted: Hosted, event: LoadEvent, error: WireError | None = None) -> None:
        """Change a state as the table says. Report a model's new state."""
        before, hosted.state = hosted.state, next_state(hosted.state, event)
        own = self.models if hosted.number is None else self._successors
        if hosted.state.is_gone and own.get(hosted.card.id) is hosted:
            del own[hosted.card.id]
        if hosted.number is None and hosted.state.report != before.report:
            self._report(hosted, error=error)
        if hosted.state.is_gone and hosted.next is not None:
            self.apply(hosted.next)

    def _report(self, hosted: Hosted, **details: Any) -> None:
        runner = hosted.runner if hosted.state is LoadState.LOADED else None
        if runner is not None:
            details.update(
                memory_bytes=runner.memory_bytes,
                dtype=str(getattr(runner, "dtype", "")),
                fallbacks=hosted.fallbacks,
                cache_tokens=getattr(runner, "num_blocks", 0) * getattr(runner, "block_tokens", 0),
            )
        self._send(ModelReport(hosted.card.id, hosted.state.report, self.device_of(hosted), **details))

    def device_of(self, hosted: Hosted) -> str:
        """Return the device on which a model runs: the worker's, unless it fell back to the CPU."""
        return "cpu" if any(fallback.name == "cpu" for fallback in hosted.fallbacks) else self.device

    def _load(self, hosted: Hosted) -> _Ended | DeviceLostError:
        card = hosted.card
        self._loads.post(_Progress(hosted, 0.0, "starting"))
        try:
            with collecting(card.id) as fallbacks:
                runner = self._build(
                    card, lambda fraction, text: self._loads.post(_Progress(hosted, fraction, text)), hosted.room
                )
        except BaseException as error:  # a failed load must not harm the worker's other models
            _log.exception("loading %s failed", card.id)
            return DeviceLostError(str(error)) if is_device_lost(error) else self._failed(hosted, error)
        return _Ended(hosted, runner, fallbacks.found)

    def _failed(self, hosted: Hosted, error: BaseException) -> _Ended:
        return _Ended(hosted, error=_load_error(hosted.card, error))


def _load_error(card: ModelCard, error: BaseException) -> WireError:
    if isinstance(error, SieError):
        return to_wire(error)
    if isinstance(error, ImportError):  # a library that transformers needs to build the model
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return to_wire(refuse(card.id, f"a library is missing or broken: {reason}", "DEPENDENCY"))
    kind = "OOM" if is_out_of_memory(error) else "UNKNOWN"
    reason = f"{type(error).__name__} while loading; the server's log has the details"
    return to_wire(Internal(not_loaded(card.id, reason), extras={"error_class": kind}))
