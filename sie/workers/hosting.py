"""Owns the models of one worker: loads them on a thread beside the step loop, one at a time, and lets them go.

The loop never waits for a load. A finished one waits in a queue and rings an eventfd; `collect` takes it over in the
loop's own thread, so a model's state changes only between steps.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from sie.cards import ModelCard, ModelState
from sie.control_messages import ModelReport
from sie.errors import Internal, SieError, WireError, to_wire
from sie.logs import get_logger
from sie.workers.faults import DeviceLostError, is_out_of_memory, is_sticky
from sie.workers.memory import free_model
from sie.workers.runners import Runner

_log = get_logger(__name__)

Build = Callable[[ModelCard, Callable[[float, str], None]], Runner]
"""Returns a ready runner for a card, reporting (fraction, text) on the way."""


class Hosted(msgspec.Struct):
    """One model of this worker. runner is there exactly while state is loaded or unloading.

    is_dismissed: it was asked to go while it loaded, and goes as soon as that has ended.
    """

    card: ModelCard
    state: ModelState
    runner: Runner | None = None
    is_dismissed: bool = False


class Host:
    """All models of this worker. Everything but the load itself happens in the loop's thread."""

    def __init__(self, device: str, build: Build, send_report: Callable[[ModelReport], None]) -> None:
        self.device = device
        self._build = build
        self._send = send_report
        self._wanted: deque[ModelCard] = deque()
        self._is_loading = False
        self._news: queue.SimpleQueue[ModelReport | DeviceLostError | tuple[ModelCard, Runner]] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.models: dict[str, Hosted] = {}

    def load(self, card: ModelCard) -> None:
        """Start loading a model, unless it is loading or loaded; one that is not freed yet stays instead."""
        hosted = self.models.get(card.id)
        if hosted is not None:
            hosted.is_dismissed = False
            if hosted.state == "unloading":
                hosted.state = "loaded"
                self._send_loaded(hosted)
            return
        self.models[card.id] = Hosted(card, "loading")
        self._send(ModelReport(card.id, "loading", self.device))
        self._wanted.append(card)
        self._start_next()

    def runner(self, model: str) -> Runner | None:
        """Return the runner that takes new work for a model, or None while it is not loaded."""
        hosted = self.models.get(model)
        return hosted.runner if hosted is not None and hosted.state == "loaded" else None

    def start_unload(self, model: str) -> None:
        """Take no new work for a model; `finish_unload` frees it once nothing of it waits.

        A load that has not begun is called off; one that has cannot be, and the model goes when it is there.
        """
        hosted = self.models.get(model)
        if hosted is None:
            return
        if hosted.state == "loaded":
            self._begin_unload(hosted)
        elif hosted.card in self._wanted:
            self._wanted.remove(hosted.card)
            del self.models[model]
            self._send(ModelReport(model, "available", self.device))
        else:
            hosted.is_dismissed = True

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
        """Take over finished loads and pass progress on; return the models that are newly loaded.

        Raises DeviceLostError when a load found the device of no more use to this process.
        """
        os.eventfd_read(self.event_fd)
        loaded: list[Hosted] = []
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, DeviceLostError):
                raise news
            if isinstance(news, ModelReport):
                if news.state == "failed":
                    self.models.pop(news.model, None)
                    self._is_loading = False
                self._send(news)
                continue
            self._is_loading = False
            card, runner = news
            was_dismissed = self.models[card.id].is_dismissed
            hosted = self.models[card.id] = Hosted(card, "loaded", runner)
            if was_dismissed:
                self._begin_unload(hosted)
                continue
            loaded.append(hosted)
            self._send_loaded(hosted)
        self._start_next()
        return loaded

    def _send_loaded(self, hosted: Hosted) -> None:
        assert hosted.runner is not None
        dtype = str(getattr(hosted.runner, "dtype", ""))
        self._send(ModelReport(hosted.card.id, "loaded", self.device, hosted.runner.memory_bytes, dtype))

    def _start_next(self) -> None:
        """Start the next load, on a thread that ends with it.

        A thread that stayed would keep its OpenMP team: with more threads than cores libgomp stops to spin, and every
        step of the loop's own thread took twice as long.
        """
        if self._wanted and not self._is_loading:
            self._is_loading = True
            card = self._wanted.popleft()
            try:
                threading.Thread(target=self._load, args=(card,), name="load", daemon=True).start()
            except RuntimeError as error:  # a limit on threads
                _log.error("loading %s failed: %s", card.id, error)
                self._tell(ModelReport(card.id, "failed", self.device, error=_load_error(card, error)))

    def _load(self, card: ModelCard) -> None:
        self._progress(card, 0.0, "starting")
        try:
            runner = self._build(card, lambda fraction, text: self._progress(card, fraction, text))
        except BaseException as error:  # a load must never take the worker's other models with it
            _log.exception("loading %s failed", card.id)
            if is_sticky(error):
                self._tell(DeviceLostError(str(error)))
                return
            self._tell(ModelReport(card.id, "failed", self.device, error=_load_error(card, error)))
        else:
            self._tell((card, runner))

    def _progress(self, card: ModelCard, fraction: float, text: str) -> None:
        self._tell(ModelReport(card.id, "loading", self.device, progress=fraction, detail=text))

    def _tell(self, news: ModelReport | DeviceLostError | tuple[ModelCard, Runner]) -> None:
        self._news.put(news)
        os.eventfd_write(self.event_fd, 1)


def _load_error(card: ModelCard, error: BaseException) -> WireError:
    if isinstance(error, SieError):
        return to_wire(error)
    kind = "OOM" if is_out_of_memory(error) else "UNKNOWN"
    reason = f"{type(error).__name__} while loading; the server's log has the details"
    return to_wire(Internal(f"Model '{card.id}': {reason}", extras={"error_class": kind}))
