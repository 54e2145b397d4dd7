"""Owns what a frontend knows of the models: their cards and states from the supervisor, and their tokenizers.

The supervisor sends all of it whenever anything changed. Tokenizers are read on a thread as soon as a model loads, so
that the event loop never waits for a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sie.control import ModelEntry, Models, WorkerEntry
from sie.errors import ModelLoadFailed, Unavailable, from_wire
from sie.frontend.tokenize import Tokenizer
from sie.logs import get_logger

_log = get_logger(__name__)
_LOADING_RETRY_S = 5
"""`Retry-After` of a model that loads. Source: SIE API reference, section 12."""


class ModelTable:
    """All models of the server. `entries` is replaced as a whole and keeps the order of the command line."""

    def __init__(self, pool: ThreadPoolExecutor, ask_load: Callable[[str], None]) -> None:
        self._pool = pool
        self._ask_load = ask_load
        self._tokenizers: dict[str, tuple[str, asyncio.Future[Tokenizer]]] = {}
        self.entries: dict[str, ModelEntry] = {}
        self.workers: tuple[WorkerEntry, ...] = ()
        self.is_ready = False
        self.reason = "starting"
        self.config_error = ""
        self.created_s = int(time.time())
        self._changed = asyncio.Event()
        self.used: set[str] = set()
        """Models that answered since they were last reported."""

    def __contains__(self, model: object) -> bool:
        return model in self.entries

    def update(self, message: Models) -> None:
        """Take over the supervisor's view."""
        self.entries = {entry.card.id: entry for entry in message.entries}
        self.workers = message.workers
        self.is_ready = message.ready
        self.reason = message.reason
        self.config_error = message.config_error
        for entry in message.entries:
            if entry.card.tokenizer_file and entry.state in ("loading", "loaded"):
                self._start_tokenizer(entry)
        self._changed.set()
        self._changed = asyncio.Event()

    def find(self, model: str) -> ModelEntry | None:
        """Return a model's entry, or None for an unknown id."""
        return self.entries.get(model)

    def able(self, output: str) -> list[str]:
        """Return the ids of the models that have this output."""
        return [name for name, entry in self.entries.items() if output in entry.card.outputs]

    def check_serving(self, entry: ModelEntry) -> None:
        """Raise what a request for this model has to hear, unless it can be served or waits for a recovery.

        A model that was never loaded starts to load. Raises Unavailable or ModelLoadFailed.
        """
        if entry.workers and entry.state == "loaded":
            self.used.add(entry.card.id)
            return
        if entry.recovering:
            return
        model = entry.card.id
        if entry.state == "unloading":
            raise Unavailable(f"Model '{model}' is unloading", code="MODEL_NOT_LOADED")
        self._ask_load(model)
        if entry.state == "failed" and entry.error is not None:
            error = from_wire(entry.error)
            raise ModelLoadFailed(f"Model '{model}' failed to load: {error.message}", extras=error.extras)
        raise Unavailable(f"Model '{model}' is loading; retry in {_LOADING_RETRY_S} s", retry_after_s=_LOADING_RETRY_S)

    async def wait_serving(self, entry: ModelEntry, deadline_ns: int) -> ModelEntry:
        """Return a model's entry once it can be served: what `check_serving` refuses as loading waits here.

        Raises as `check_serving` does: at once for a failed load, at the deadline for one that goes on.
        """
        while True:
            changed = self._changed
            try:
                self.check_serving(entry)
            except Unavailable as error:
                left_s = (deadline_ns - time.monotonic_ns()) / 1e9
                if error.code != Unavailable.code or left_s <= 0:
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left_s)
            else:
                return entry
            entry = self.entries.get(entry.card.id, entry)

    async def tokenizer(self, entry: ModelEntry) -> Tokenizer:
        """Return a model's tokenizer. Raises Internal when its file cannot be read."""
        return await asyncio.shield(self._start_tokenizer(entry))  # others may wait for it, too

    def ready_tokenizer(self, entry: ModelEntry) -> Tokenizer | None:
        """Return a model's tokenizer if it has been read, without waiting."""
        known = self._tokenizers.get(entry.card.id)
        if known is None or known[0] != entry.card.tokenizer_file or not known[1].done() or _has_failed(known[1]):
            return None
        return known[1].result()

    def _start_tokenizer(self, entry: ModelEntry) -> asyncio.Future[Tokenizer]:
        card = entry.card
        known = self._tokenizers.get(card.id)
        if known is not None and known[0] == card.tokenizer_file and not _has_failed(known[1]):
            return known[1]
        future = asyncio.get_running_loop().run_in_executor(self._pool, Tokenizer.load, card)
        future.add_done_callback(_note_failure)
        self._tokenizers[card.id] = (card.tokenizer_file, future)
        return future


def _has_failed(future: asyncio.Future[Tokenizer]) -> bool:
    return future.done() and future.exception() is not None


def _note_failure(future: asyncio.Future[Tokenizer]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.error("%s", error)
