"""Finds the adapter of a request and requests its load. Must only accept adapters that the operator declared.

The setting `lora` declares adapters, so a request can name neither a path nor a repository.
Source: SIE API reference, section 11.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from sie.catalog.profiles import model_of
from sie.frontend.models.model_table import ModelTable
from sie.ipc.messages import ModelEntry, Touch, WantAdapter
from sie.values.errors import BadRequest, Unavailable, from_wire
from sie.values.inference import EncodeRequest

_CODE: Final = "LORA_LOADING"
_RETRY_S: Final = 1
"""`Retry-After` for a loading adapter. Source: SIE API reference, section 11."""
_ASK_EVERY_S: Final = 0.25


class AdapterTable:
    """The adapters of all models, for the requests of one process."""

    def __init__(self, models: ModelTable, send: Callable[[Touch | WantAdapter], None]) -> None:
        self._models = models
        self._send = send
        self._asked: dict[tuple[str, str], float] = {}
        self._used: dict[tuple[str, str], None] = {}

    def check_declared(self, entry: ModelEntry, adapter: str) -> None:
        """Raise BadRequest if the operator has not declared the adapter for this model."""
        if adapter in entry.adapters:
            return
        model = entry.card.id
        if not entry.adapters:
            raise BadRequest(
                f"Model '{model}' has no adapters: none is declared by the setting 'lora' - at `$.params.options.lora_id`"
            )
        raise BadRequest(
            f"Adapter '{adapter}' of model '{model}' not found; the setting 'lora' declares: {list(entry.adapters)} "
            "- at `$.params.options.lora_id`"
        )

    async def serving(self, entry: ModelEntry, adapter: str, wait_until_ns: int) -> ModelEntry:
        """Return the model's entry once a worker has this declared adapter. Requests a load if necessary.

        wait_until_ns 0 never waits. Raises Unavailable LORA_LOADING, or the error of the last load: Internal, or BadRequest
        if the adapter does not fit the model. Raises the errors of `ModelTable.wait_serving` if the model is unloaded or
        removed before.
        """
        while True:
            changed = self._models.changed
            try:
                self._check_serving(entry, adapter)
            except Unavailable:
                left_s = (wait_until_ns - time.monotonic_ns()) / 1e9
                if left_s <= 0:
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left_s)
            else:
                return entry
            # An adapter loads only while its model is loaded.
            entry = await self._models.wait_serving(self._models.current(entry), wait_until_ns)

    def _check_serving(self, entry: ModelEntry, adapter: str) -> None:
        key = model_of(entry.card.id), adapter
        state = entry.adapters[adapter]  # declarations do not change while the server runs
        if state.workers:
            self._used.pop(key, None)
            self._used[key] = None
            return
        if state.recovering:  # the engine holds requests until a worker has the adapter again
            return
        if state.state != "loading":
            self._ask(key)
        if state.state == "failed" and state.error is not None:
            raise from_wire(state.error)
        raise loading(key[0], adapter)

    def take_used(self) -> tuple[tuple[str, str], ...]:
        """Return each (model, adapter) that was used since the last call, the most recent last."""
        used, self._used = tuple(self._used), {}
        return used

    def _ask(self, key: tuple[str, str]) -> None:
        """Request a load, at a limited rate. Report used adapters first, because a load may evict."""
        now_s = time.monotonic()
        if now_s - self._asked.get(key, 0.0) >= _ASK_EVERY_S:
            self._asked[key] = now_s
            self._send(Touch((), self.take_used()))
            self._send(WantAdapter(*key))


def requested_adapter(request: EncodeRequest) -> str | None:
    """Return the adapter that a resolved request names, or None for the model alone."""
    return request.options.get("lora_id")


def loading(model: str, adapter: str) -> Unavailable:
    """Return the error for a request whose adapter is on no worker now."""
    return Unavailable(
        f"Adapter '{adapter}' of model '{model}' is loading; retry in {_RETRY_S} s", code=_CODE, retry_after_s=_RETRY_S
    )


def workers_with(entry: ModelEntry | None, adapter: str) -> tuple[int, ...]:
    """Return the workers that have a model and its adapter. An empty adapter means the model alone."""
    if entry is None:
        return ()
    if not adapter:
        return entry.workers
    found = entry.adapters.get(adapter)
    return () if found is None else tuple(slot for slot in entry.workers if slot in found.workers)


def is_coming(entry: ModelEntry, adapter: str) -> bool:
    """Tell whether requests for this adapter may wait for a worker. An empty adapter means the model alone."""
    return not adapter or (adapter in entry.adapters and entry.adapters[adapter].state in ("loading", "loaded"))
