"""Loads and unloads the models of one worker; loads one at a time on a thread beside the step loop.

A model whose files changed may have a successor staged beside it. The successor is loaded, and comes into use with the
next `Load` of its card.

The loop never waits for a load. A finished load waits in a queue and signals an eventfd. `collect` handles it on the
loop's own thread, so a model's state changes only between steps.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from sie.catalog.files import refuse
from sie.ipc.messages import Load, ModelReport, Stage, Staged, Unload, Unstage
from sie.runtime.logs import get_logger
from sie.values.card import ModelCard, ModelState
from sie.values.errors import Internal, SieError, WireError, to_wire
from sie.workers.device.faults import DeviceLostError, is_out_of_memory, is_sticky
from sie.workers.device.memory import free_model
from sie.workers.model_api import Runner

_log = get_logger(__name__)

Build = Callable[[ModelCard, Callable[[float, str], None]], Runner]
"""Returns a ready runner for a card, and reports (fraction, text) as progress."""


class Hosted(msgspec.Struct):
    """One model of this worker. runner is set exactly while state is loaded or unloading.

    unload_after_load: an unload arrived during its load, so it is unloaded as soon as the load ends.
    """

    card: ModelCard
    state: ModelState
    runner: Runner | None = None
    unload_after_load: bool = False


class _Ended(NamedTuple):
    """A finished load with its runner or its error. card is the same object that the load started with."""

    card: ModelCard
    runner: Runner | None = None
    error: WireError | None = None


class Host:
    """All models of this worker. Only the load itself happens outside the loop's thread."""

    def __init__(self, device: str, build: Build, send_report: Callable[[ModelReport | Staged], None]) -> None:
        self.device = device
        self._build = build
        self._send = send_report
        self._pending: deque[ModelCard] = deque()
        self._current: ModelCard | None = None
        """The card that the load's thread works on."""
        self._staging: dict[str, Stage] = {}
        self._staged: dict[str, _Ended] = {}
        self._events: queue.SimpleQueue[ModelReport | DeviceLostError | _Ended] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.models: dict[str, Hosted] = {}

    def apply(self, message: Load | Unload | Stage | Unstage) -> None:
        """Apply a message of the supervisor."""
        match message:
            case Load(card):
                self.load(card)
            case Unload(model):
                self.start_unload(model)
            case Stage():
                self.stage(message)
            case Unstage(model):
                self.unstage(model)

    def stage(self, message: Stage) -> None:
        """Start loading a model's successor, in place of an earlier one; `Staged` reports the result."""
        self.unstage(message.card.id)
        self._staging[message.card.id] = message
        self._pending.append(message.card)
        self._start_next()

    def unstage(self, model: str) -> None:
        """Drop a model's staged successor. A running load is dropped when it ends."""
        message = self._staging.pop(model, None)
        if message is not None:
            self._pending = deque(card for card in self._pending if card is not message.card)
        if self._staged.pop(model, None) is not None:
            free_model()

    def load(self, card: ModelCard) -> None:
        """Start loading a model, unless it is loading or loaded. An unloading model stays loaded.

        A successor staged with the same card is loaded at once.
        """
        hosted = self.models.get(card.id)
        if hosted is not None:
            hosted.unload_after_load = False
            if hosted.state == "unloading":
                hosted.state = "loaded"
                self._send_loaded(hosted)
            return
        self.models[card.id] = Hosted(card, "loading")
        self._send(ModelReport(card.id, "loading", self.device))
        staged = self._staged.pop(card.id, None)
        if staged is not None and staged.card == card:
            self._post(staged._replace(card=card))
            return
        self._pending.append(card)
        self._start_next()

    def runner(self, model: str) -> Runner | None:
        """Return the runner that takes new work for a model, or None while it is not loaded."""
        hosted = self.models.get(model)
        return hosted.runner if hosted is not None and hosted.state == "loaded" else None

    def start_unload(self, model: str) -> None:
        """Take no new work for a model; `finish_unload` frees it once none of its items waits.

        A load that has not started is cancelled. A running load continues, and the model is unloaded when it ends.
        """
        hosted = self.models.get(model)
        if hosted is None:
            return
        if hosted.state == "loaded":
            self._begin_unload(hosted)
        elif any(card is hosted.card for card in self._pending):
            self._pending = deque(card for card in self._pending if card is not hosted.card)
            del self.models[model]
            self._send(ModelReport(model, "available", self.device))
        else:
            hosted.unload_after_load = True

    def _begin_unload(self, hosted: Hosted) -> None:
        hosted.state = "unloading"
        self._send(ModelReport(hosted.card.id, "unloading", self.device))

    def unloading(self) -> list[str]:
        """Return the models that `finish_unload` still has to free."""
        return [name for name, hosted in self.models.items() if hosted.state == "unloading"]

    def finish_unload(self, model: str) -> None:
        """Free a model."""
        del self.models[model]
        free_model()
        self._send(ModelReport(model, "available", self.device))

    def collect(self) -> list[Hosted]:
        """Handle finished loads and forward progress. Return the newly loaded models.

        Raises DeviceLostError if a load found that this process has lost the device.
        """
        os.eventfd_read(self.event_fd)
        loaded: list[Hosted] = []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, DeviceLostError):
                raise event
            if isinstance(event, ModelReport):
                hosted = self.models.get(event.model)
                if hosted is not None and hosted.state == "loading":  # else a successor is loading
                    self._send(event)
                continue
            if event.card is self._current:
                self._current = None
            hosted = self._finish_load(event)
            if hosted is not None:
                loaded.append(hosted)
        self._start_next()
        return loaded

    def _finish_load(self, ended: _Ended) -> Hosted | None:
        """Record the end of a load. Return the model that now takes work, if there is one."""
        model = ended.card.id
        hosted = self.models.get(model)
        if hosted is None or hosted.card is not ended.card:
            self._finish_staged(ended)
        elif ended.runner is None:
            del self.models[model]
            self._send(ModelReport(model, "failed", self.device, error=ended.error))
        else:
            must_unload = hosted.unload_after_load
            hosted = self.models[model] = Hosted(ended.card, "loaded", ended.runner)
            if not must_unload:
                self._send_loaded(hosted)
                return hosted
            self._begin_unload(hosted)
        return None

    def _finish_staged(self, ended: _Ended) -> None:
        message = self._staging.get(ended.card.id)
        if message is None or message.card is not ended.card:  # it was cancelled during its load
            free_model()
            return
        del self._staging[ended.card.id]
        if ended.runner is not None:
            self._staged[ended.card.id] = ended
        self._send(Staged(message.number, ended.card.id, ended.error))

    def _send_loaded(self, hosted: Hosted) -> None:
        assert hosted.runner is not None
        dtype = str(getattr(hosted.runner, "dtype", ""))
        self._send(ModelReport(hosted.card.id, "loaded", self.device, hosted.runner.memory_bytes, dtype))

    def _start_next(self) -> None:
        """Start the next load on a thread that ends with it.

        A permanent thread would keep its OpenMP team. With more threads than cores libgomp stops spinning, and every
        step of the loop's own thread took twice as long.
        """
        if self._pending and self._current is None:
            card = self._current = self._pending.popleft()
            try:
                threading.Thread(target=self._load, args=(card,), name="load", daemon=True).start()
            except RuntimeError as error:  # for example a thread limit
                _log.error("loading %s failed: %s", card.id, error)
                self._post(_Ended(card, error=_load_error(card, error)))

    def _load(self, card: ModelCard) -> None:
        self._progress(card, 0.0, "starting")
        try:
            runner = self._build(card, lambda fraction, text: self._progress(card, fraction, text))
        except BaseException as error:  # a failed load must not harm the worker's other models
            _log.exception("loading %s failed", card.id)
            if is_sticky(error):
                self._post(DeviceLostError(str(error)))
                return
            self._post(_Ended(card, error=_load_error(card, error)))
        else:
            self._post(_Ended(card, runner))

    def _progress(self, card: ModelCard, fraction: float, text: str) -> None:
        self._post(ModelReport(card.id, "loading", self.device, progress=fraction, detail=text))

    def _post(self, event: ModelReport | DeviceLostError | _Ended) -> None:
        self._events.put(event)
        os.eventfd_write(self.event_fd, 1)


def _load_error(card: ModelCard, error: BaseException) -> WireError:
    if isinstance(error, SieError):
        return to_wire(error)
    if isinstance(error, ImportError):  # a library that transformers needs to build the model
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return to_wire(refuse(card.id, f"a library is missing or broken: {reason}", "DEPENDENCY"))
    kind = "OOM" if is_out_of_memory(error) else "UNKNOWN"
    reason = f"{type(error).__name__} while loading; the server's log has the details"
    return to_wire(Internal(f"Model '{card.id}': {reason}", extras={"error_class": kind}))
