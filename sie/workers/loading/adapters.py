"""Owns the adapters of one worker: reads them on a thread beside the step loop, one at a time, and lets them go.

Which adapters a model has in memory is the runner's own `adapters`, so they end with the model; here is only what is
on its way in or out. As in `sie.workers.loading.hosting`, a finished load rings an eventfd and the loop takes it over.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sie.ipc.messages import AdapterReport, LoadAdapter, UnloadAdapter
from sie.runtime.logs import get_logger
from sie.values.card import AdapterSpec
from sie.values.errors import BadRequest, Internal, SieError, Unavailable, to_wire
from sie.workers.device.memory import free_model
from sie.workers.loading.hosting import Host
from sie.workers.model_api import Adapters, Runner
from sie.workers.scheduling.waiting import Waiting

_log = get_logger(__name__)
_RETRY_S = 1
"""`Retry-After` of an adapter that loads. Source: SIE API reference, section 11."""


class _Read(NamedTuple):
    """A finished load: weights, or the error that ended it; runner is what they were read for."""

    spec: AdapterSpec
    runner: Runner
    weights: Any
    error: SieError | None


class AdapterHost:
    """All adapters of this worker. Everything but the reading happens in the loop's thread."""

    def __init__(
        self, host: Host, send_report: Callable[[AdapterReport], None], set_count: Callable[[str, int], None]
    ) -> None:
        """Tell set_count how many adapters of a model are in memory whenever that changes."""
        self._host = host
        self._send = send_report
        self._set_count = set_count
        self._counted: set[str] = set()
        self._wanted: deque[AdapterSpec] = deque()
        self._loading: set[tuple[str, str]] = set()
        self._unloading: set[tuple[str, str]] = set()
        self._is_reading = False
        self._reader = threading.Thread()
        self._news: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def apply(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Do what the supervisor says."""
        if isinstance(message, LoadAdapter):
            self.load(message.spec)
        else:
            self._start_unload(message.model, message.adapter)

    def refusal(self, model: str, adapter: str) -> Unavailable | None:
        """Return None while new work may run with this adapter, else LORA_LOADING: a retry finds out why."""
        found = self._adapters(self._host.runner(model))
        if found is not None and adapter in found and (model, adapter) not in self._unloading:
            return None
        return Unavailable(
            f"Adapter '{adapter}' of model '{model}' is not loaded; retry in {_RETRY_S} s",
            code="LORA_LOADING",
            retry_after_s=_RETRY_S,
        )

    def load(self, spec: AdapterSpec) -> None:
        """Start to load an adapter, unless it is loading or loaded; one that is not freed yet stays instead."""
        key = spec.model, spec.id
        runner = self._host.runner(spec.model)
        found = self._adapters(runner)
        if runner is None:  # unloaded meanwhile; what loads it again asks again
            self._send(AdapterReport(*key, "available"))
        elif found is None:
            self._fail(spec, BadRequest(f"Model '{spec.model}' cannot run adapters"))
        elif spec.id in found:
            self._unloading.discard(key)
            self._send(AdapterReport(*key, "loaded"))
        elif key not in self._loading:
            self._loading.add(key)
            self._send(AdapterReport(*key, "loading"))
            self._wanted.append(spec)
            self._start_next()

    def _start_unload(self, model: str, adapter: str) -> None:
        """Take no new work for an adapter; `settle` frees it once nothing of it waits."""
        found = self._adapters(self._host.runner(model))
        if found is not None and adapter in found:
            self._unloading.add((model, adapter))
            self._send(AdapterReport(model, adapter, "unloading"))

    def settle(self, waiting_of: Callable[[str], Iterable[Waiting]]) -> None:
        """Free the adapters that are to go and that none of a model's waiting items needs."""
        for model, adapter in list(self._unloading):
            if any(item.request.header.lora == adapter for item in waiting_of(model)):
                continue
            self._unloading.discard((model, adapter))
            hosted = self._host.models.get(model)  # its model may be on its way out, too, and yet stay
            found = self._adapters(hosted.runner if hosted is not None else None)
            if found is not None and adapter in found:
                found.remove(adapter)
                self._publish(model, len(found))
                self._send(AdapterReport(model, adapter, "available"))

    def forget(self, model: str) -> None:
        """Take note that a model is gone, and its adapters with it."""
        self._unloading = {key for key in self._unloading if key[0] != model}
        if model in self._counted:
            self._publish(model, 0)

    def collect(self) -> None:
        """Take over what has been read."""
        os.eventfd_read(self.event_fd)
        while not self._news.empty():
            news = self._news.get()
            self._is_reading = False
            spec = news.spec
            self._loading.discard((spec.model, spec.id))
            if self._host.runner(spec.model) is not news.runner:
                del news
                self._reader.join()  # it has nothing left to do but let go of the model, which it kept while that went
                free_model()
                self.load(spec)  # for the model as it is now, or to say that it has gone
            elif news.error is not None:
                self._fail(news.spec, news.error)
            else:
                self._install(news)
        self._start_next()

    def _install(self, news: _Read) -> None:
        found = self._adapters(news.runner)
        assert found is not None
        try:
            nbytes = found.install(news.spec.id, news.weights)
        except SieError as error:
            self._fail(news.spec, error)
        else:
            self._publish(news.spec.model, len(found))
            self._send(AdapterReport(news.spec.model, news.spec.id, "loaded", nbytes))

    def _publish(self, model: str, num_loaded: int) -> None:
        self._counted.add(model)
        self._set_count(model, num_loaded)

    def _fail(self, spec: AdapterSpec, error: SieError) -> None:
        self._send(AdapterReport(spec.model, spec.id, "failed", error=to_wire(error)))

    def _start_next(self) -> None:
        """Start to read the next adapter, on a thread that ends with it (`sie.workers.loading.hosting` says why)."""
        if not self._wanted or self._is_reading:
            return
        spec = self._wanted.popleft()
        runner = self._host.runner(spec.model)
        found = self._adapters(runner)
        if runner is None or found is None:
            self._loading.discard((spec.model, spec.id))
            self._send(AdapterReport(spec.model, spec.id, "available"))
            self._start_next()
            return
        self._is_reading = True
        self._reader = threading.Thread(target=self._read, args=(spec, runner, found), name="load-adapter", daemon=True)
        self._reader.start()

    def _read(self, spec: AdapterSpec, runner: Runner, found: Adapters) -> None:
        weights, failed = None, None
        try:
            weights = found.read(spec)
        except SieError as error:
            failed = error
        except BaseException as error:  # a load must never take the worker's other models with it
            _log.exception("loading adapter %s of %s failed", spec.id, spec.model)
            failed = Internal(
                f"Adapter '{spec.id}' cannot be loaded: {type(error).__name__}; the server's log says more"
            )
        self._news.put(_Read(spec, runner, weights, failed))
        os.eventfd_write(self.event_fd, 1)

    @staticmethod
    def _adapters(runner: Runner | None) -> Adapters | None:
        return getattr(runner, "adapters", None)
