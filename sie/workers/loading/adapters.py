"""Loads and unloads the adapters of one worker; reads one at a time on a thread beside the step loop.

The runner's own `adapters` holds the loaded ones, so they end with their model. This module holds only those that are
being loaded or unloaded. As in `sie.workers.loading.hosting`, a finished load signals an eventfd, and the loop collects
it.
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
"""The `Retry-After` of a loading adapter. Source: SIE API reference, section 11."""


class _Read(NamedTuple):
    """A finished load: weights or an error, and the runner that they were read for."""

    spec: AdapterSpec
    runner: Runner
    weights: Any
    error: SieError | None


class AdapterHost:
    """All adapters of this worker. Only reading happens outside the loop's thread."""

    def __init__(
        self, host: Host, send_report: Callable[[AdapterReport], None], set_count: Callable[[str, int], None]
    ) -> None:
        """Call set_count with a model and its number of loaded adapters, whenever the number changes."""
        self._host = host
        self._send = send_report
        self._set_count = set_count
        self._counted: set[str] = set()
        self._pending: deque[AdapterSpec] = deque()
        self._loading: set[tuple[str, str]] = set()
        self._unloading: set[tuple[str, str]] = set()
        self._is_reading = False
        self._reader = threading.Thread()
        self._events: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def apply(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Apply a message of the supervisor."""
        if isinstance(message, LoadAdapter):
            self.load(message.spec)
        else:
            self._start_unload(message.model, message.adapter)

    def refusal(self, model: str, adapter: str) -> Unavailable | None:
        """Return None if new work may run with this adapter, else LORA_LOADING for any reason; a retry reveals it."""
        found = self._adapters(self._host.runner(model))
        if found is not None and adapter in found and (model, adapter) not in self._unloading:
            return None
        return Unavailable(
            f"Adapter '{adapter}' of model '{model}' is not loaded; retry in {_RETRY_S} s",
            code="LORA_LOADING",
            retry_after_s=_RETRY_S,
        )

    def load(self, spec: AdapterSpec) -> None:
        """Start to load an adapter, unless it is loading or loaded. An unloading adapter stays loaded."""
        key = spec.model, spec.id
        runner = self._host.runner(spec.model)
        found = self._adapters(runner)
        if runner is None:  # unloaded meanwhile; the supervisor asks again after the next load
            self._send(AdapterReport(*key, "available"))
        elif found is None:
            self._fail(spec, BadRequest(f"Model '{spec.model}' cannot run adapters"))
        elif spec.id in found:
            self._unloading.discard(key)
            self._send(AdapterReport(*key, "loaded"))
        elif key not in self._loading:
            self._loading.add(key)
            self._send(AdapterReport(*key, "loading"))
            self._pending.append(spec)
            self._start_next()

    def _start_unload(self, model: str, adapter: str) -> None:
        """Take no new work for an adapter; `settle` frees it once no item of it waits."""
        found = self._adapters(self._host.runner(model))
        if found is not None and adapter in found:
            self._unloading.add((model, adapter))
            self._send(AdapterReport(model, adapter, "unloading"))

    def settle(self, waiting_of: Callable[[str], Iterable[Waiting]]) -> None:
        """Free the unloading adapters that none of a model's waiting items needs."""
        for model, adapter in list(self._unloading):
            if any(item.request.header.lora == adapter for item in waiting_of(model)):
                continue
            self._unloading.discard((model, adapter))
            hosted = self._host.models.get(model)  # its model may be unloading too, and may still stay
            found = self._adapters(hosted.runner if hosted is not None else None)
            if found is not None and adapter in found:
                found.remove(adapter)
                self._publish(model, len(found))
                self._send(AdapterReport(model, adapter, "available"))

    def forget(self, model: str) -> None:
        """Forget the adapters of a model that is gone."""
        self._unloading = {key for key in self._unloading if key[0] != model}
        if model in self._counted:
            self._publish(model, 0)

    def collect(self) -> None:
        """Install the adapters that have been read."""
        os.eventfd_read(self.event_fd)
        while not self._events.empty():
            event = self._events.get()
            self._is_reading = False
            spec = event.spec
            self._loading.discard((spec.model, spec.id))
            if self._host.runner(spec.model) is not event.runner:
                del event
                self._reader.join()  # the thread only has to drop its reference, which kept the old model alive
                free_model()
                self.load(spec)  # for the model as it is now, or to report that it is gone
            elif event.error is not None:
                self._fail(event.spec, event.error)
            else:
                self._install(event)
        self._start_next()

    def _install(self, event: _Read) -> None:
        found = self._adapters(event.runner)
        assert found is not None
        try:
            nbytes = found.install(event.spec.id, event.weights)
        except SieError as error:
            self._fail(event.spec, error)
        else:
            self._publish(event.spec.model, len(found))
            self._send(AdapterReport(event.spec.model, event.spec.id, "loaded", nbytes))

    def _publish(self, model: str, num_loaded: int) -> None:
        self._counted.add(model)
        self._set_count(model, num_loaded)

    def _fail(self, spec: AdapterSpec, error: SieError) -> None:
        self._send(AdapterReport(spec.model, spec.id, "failed", error=to_wire(error)))

    def _start_next(self) -> None:
        """Read the next adapter on a thread that ends with it (`sie.workers.loading.hosting` gives the reason)."""
        if not self._pending or self._is_reading:
            return
        spec = self._pending.popleft()
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
        except BaseException as error:  # a failed load must not harm the worker's other models
            _log.exception("loading adapter %s of %s failed", spec.id, spec.model)
            failed = Internal(
                f"Adapter '{spec.id}' cannot be loaded: {type(error).__name__}; the server's log says more"
            )
        self._events.put(_Read(spec, runner, weights, failed))
        os.eventfd_write(self.event_fd, 1)

    @staticmethod
    def _adapters(runner: Runner | None) -> Adapters | None:
        return getattr(runner, "adapters", None)
