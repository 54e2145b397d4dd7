"""Loads and unloads the adapters of one worker; reads one at a time on a thread beside the step loop.

An adapter ends with its model: the runner's `adapters` holds its weights, and `forget` removes its state here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from sie.ipc.messages import AdapterReport, LoadAdapter, UnloadAdapter
from sie.runtime.logs import get_logger
from sie.values.card import AdapterSpec
from sie.values.errors import BadRequest, Internal, SieError, Unavailable, WireError, to_wire
from sie.workers.device.memory import free_model
from sie.workers.loading.hosting import Host
from sie.workers.loading.load_queue import LoadQueue
from sie.workers.loading.states import LoadEvent, LoadState, next_state
from sie.workers.model_api import Adapters, Runner
from sie.workers.scheduling.waiting import WaitingItem

_log = get_logger(__name__)
_RETRY_S = 1
"""The `Retry-After` of a loading adapter. Source: SIE API reference, section 11."""


class _Adapter(msgspec.Struct, eq=False):
    """One adapter of a loaded model, until both are gone. `sie.workers.loading.states` explains state."""

    spec: AdapterSpec
    runner: Runner | None
    state: LoadState = LoadState.ABSENT


class _Read(msgspec.Struct):
    """A finished load: weights or an error."""

    adapter: _Adapter
    weights: Any = None
    error: SieError | None = None


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
        self._adapters: dict[tuple[str, str], _Adapter] = {}
        self._loads: LoadQueue[_Adapter] = LoadQueue("load-adapter", self._read, self._failed)
        self.event_fd = self._loads.event_fd

    def apply(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Apply a message of the supervisor."""
        if isinstance(message, LoadAdapter):
            self.load(message.spec)
        else:
            self._start_unload(message.model, message.adapter)

    def refusal(self, model: str, adapter: str) -> Unavailable | None:
        """Return None if new work may run with this adapter, else LORA_LOADING for any reason; a retry reveals it."""
        found = self._adapters.get((model, adapter))
        if found is not None and found.state is LoadState.LOADED:
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
        if runner is None:  # unloaded meanwhile; the supervisor asks again after the next load
            if key not in self._adapters:
                self._send(AdapterReport(*key, "available"))
            return
        if _weights_of(runner) is None:
            error = to_wire(BadRequest(f"Model '{spec.model}' cannot run adapters"))
            self._send(AdapterReport(*key, "failed", error=error))
            return
        adapter = self._adapters.get(key)
        if (
            adapter is None or adapter.runner is not runner
        ):  # the old one belongs to an unloaded model; its read ends later
            adapter = self._adapters[key] = _Adapter(spec, runner)
        before = adapter.state
        self._change(adapter, LoadEvent.LOAD)
        if before.is_gone:
            self._loads.add(adapter)
        elif before is LoadState.LOADED:  # the supervisor forgot it when its model began to unload
            self._report(adapter)

    def _start_unload(self, model: str, adapter: str) -> None:
        """Take no new work for an adapter; `settle` frees it once no item of it waits."""
        found = self._adapters.get((model, adapter))
        if found is not None:
            self._change(found, LoadEvent.UNLOAD)

    def settle(self, waiting_of: Callable[[str], Iterable[WaitingItem]]) -> None:
        """Free the unloading adapters that none of a model's waiting items needs."""
        for adapter in [each for each in self._adapters.values() if each.state is LoadState.UNLOADING]:
            spec, weights = adapter.spec, _weights_of(adapter.runner)
            if any(item.request.header.lora == spec.id for item in waiting_of(spec.model)):
                continue
            assert weights is not None
            weights.remove(spec.id)
            self._publish(spec.model, len(weights))
            self._change(adapter, LoadEvent.FREE)

    def forget(self, model: str) -> None:
        """Forget the adapters of a model that is gone. The one that is read now is dropped when its load ends."""
        for adapter in [each for each in self._adapters.values() if each.spec.model == model]:
            self._change(adapter, LoadEvent.UNLOAD)
            if adapter.state is LoadState.UNLOADING:
                self._change(adapter, LoadEvent.FREE)
        if model in self._counted:
            self._publish(model, 0)

    def collect(self) -> None:
        """Install the adapters that have been read."""
        for read in self._loads.collect():
            self._finish_load(read)

    def _finish_load(self, read: _Read) -> None:
        adapter = read.adapter
        if adapter.state is LoadState.LOADING:
            self._install(read)
            return
        adapter.runner = read.weights = None
        self._loads.join()  # a short wait: the thread only drops its references to the model
        free_model()
        self._change(adapter, LoadEvent.READY)

    def _install(self, read: _Read) -> None:
        adapter, weights = read.adapter, _weights_of(read.adapter.runner)
        assert weights is not None
        try:
            if read.error is not None:
                raise read.error
            nbytes = weights.install(adapter.spec.id, read.weights)
        except SieError as error:
            self._change(adapter, LoadEvent.FAIL, error=to_wire(error))
        else:
            self._publish(adapter.spec.model, len(weights))
            self._change(adapter, LoadEvent.READY, nbytes)

    def _publish(self, model: str, num_loaded: int) -> None:
        self._counted.add(model)
        self._set_count(model, num_loaded)

    def _change(self, adapter: _Adapter, event: LoadEvent, nbytes: int = 0, error: WireError | None = None) -> None:
        """Change a state as the table says, and report the new one."""
        before, adapter.state = adapter.state, next_state(adapter.state, event)
        if adapter.state.is_gone:
            adapter.runner = None  # the queue may still hold this adapter, which must not keep the model alive
        key = adapter.spec.model, adapter.spec.id
        if self._adapters.get(key) is not adapter:  # a new model has an adapter of this name now
            return
        if adapter.state.is_gone:
            del self._adapters[key]
        if adapter.state.report != before.report:
            self._report(adapter, nbytes, error)

    def _report(self, adapter: _Adapter, nbytes: int = 0, error: WireError | None = None) -> None:
        self._send(AdapterReport(adapter.spec.model, adapter.spec.id, adapter.state.report, nbytes, error))

    def _read(self, adapter: _Adapter) -> _Read:
        found, spec = _weights_of(adapter.runner), adapter.spec
        assert found is not None
        try:
            return _Read(adapter, found.read(spec))
        except BaseException as error:  # a failed load must not harm the worker's other models
            return self._failed(adapter, error)

    def _failed(self, adapter: _Adapter, error: BaseException) -> _Read:
        if isinstance(error, SieError):
            return _Read(adapter, error=error)
        spec = adapter.spec
        _log.error("loading adapter %s of %s failed", spec.id, spec.model, exc_info=error)
        reason = f"{type(error).__name__}; see the log of the server"
        return _Read(adapter, error=Internal(f"Adapter '{spec.id}' cannot be loaded: {reason}"))


def _weights_of(runner: Runner | None) -> Adapters | None:
    """Return the loaded adapters of a model, or None for a model that cannot have any."""
    return getattr(runner, "adapters", None)
