"""Owns what a frontend does about adapters: which one a request names, whether a worker has it, and asking for a load.

An adapter is only ever one that the operator declared (the setting `lora`): a request can name neither a path nor a
repository. Source: SIE API reference, section 11.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from sie.catalog.profiles import model_of
from sie.frontend.models.table import ModelTable
from sie.ipc.messages import ModelEntry, Touch, WantAdapter
from sie.values.encode import EncodeRequest
from sie.values.errors import BadRequest, Unavailable, from_wire

_CODE: Final = "LORA_LOADING"
_RETRY_S: Final = 1
"""`Retry-After` of an adapter that loads. Source: SIE API reference, section 11."""
_ASK_EVERY_S: Final = 0.25


class AdapterTable:
    """The adapters of all models, as requests of this process meet them."""

    def __init__(self, models: ModelTable, send: Callable[[Touch | WantAdapter], None]) -> None:
        self._models = models
        self._send = send
        self._asked: dict[tuple[str, str], float] = {}
        self._used: dict[tuple[str, str], None] = {}

    def check_declared(self, entry: ModelEntry, adapter: str) -> None:
        """Raise BadRequest for an adapter that the operator has not declared for this model."""
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
        """Return the model's entry once a worker has this adapter, which is declared; one that is not loaded starts to.

        wait_until_ns 0 never waits. Raises Unavailable LORA_LOADING, or why the last load failed: Internal, or BadRequest
        when the model has no place for the adapter; and as `ModelTable.wait_serving` when the model goes meanwhile.
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
            # Without its model an adapter would never come.
            entry = await self._models.wait_serving(self._models.find(entry.card.id) or entry, wait_until_ns)

    def _check_serving(self, entry: ModelEntry, adapter: str) -> None:
        key = model_of(entry.card.id), adapter
        state = entry.adapters[adapter]  # declared once is declared for as long as the server runs
        if state.workers:
            self._used.pop(key, None)
            self._used[key] = None
            return
        if state.recovering:  # the engine holds its work until a worker has it again
            return
        if state.state != "loading":
            self._ask(key)
        if state.state == "failed" and state.error is not None:
            raise from_wire(state.error)
        raise loading(key[0], adapter)

    def take_used(self) -> tuple[tuple[str, str], ...]:
        """Return (model, adapter) of what answered since the last call, the last one used last."""
        used, self._used = tuple(self._used), {}
        return used

    def _ask(self, key: tuple[str, str]) -> None:
        """Ask for a load, not for every request; what was used so far goes ahead, since a load may evict."""
        now_s = time.monotonic()
        if now_s - self._asked.get(key, 0.0) >= _ASK_EVERY_S:
            self._asked[key] = now_s
            self._send(Touch((), self.take_used()))
            self._send(WantAdapter(*key))


def requested_adapter(request: EncodeRequest) -> str | None:
    """Return the adapter that a resolved request names, None for the model as it is."""
    return request.options.get("lora_id")


def loading(model: str, adapter: str) -> Unavailable:
    """Return the error of a request whose adapter no worker has yet, or not any more."""
    return Unavailable(
        f"Adapter '{adapter}' of model '{model}' is loading; retry in {_RETRY_S} s", code=_CODE, retry_after_s=_RETRY_S
    )


def workers_with(entry: ModelEntry | None, adapter: str) -> tuple[int, ...]:
    """Return the workers that have a model and an adapter of it; an empty adapter is the model as it is."""
    if entry is None:
        return ()
    if not adapter:
        return entry.workers
    found = entry.adapters.get(adapter)
    return () if found is None else tuple(slot for slot in entry.workers if slot in found.workers)


def is_coming(entry: ModelEntry, adapter: str) -> bool:
    """Tell whether work with this adapter may wait for a worker; an empty adapter is the model as it is."""
    return not adapter or (adapter in entry.adapters and entry.adapters[adapter].state in ("loading", "loaded"))
