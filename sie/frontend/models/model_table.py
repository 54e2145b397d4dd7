"""Holds the models' cards and states from the supervisor, and their tokenizers. Must never wait for a file on the loop.

A model has one entry for each of its profiles. All entries share the weights, state and tokenizer; workers and supervisor
know only the model (docs/decisions/006). The supervisor sends all entries after any change. A thread reads a tokenizer
as soon as its model loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from sie.catalog.profiles import entry_cards, fold_default, model_of
from sie.frontend.inputs.profile_options import gives, is_own_entry
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.models.not_found import model_not_found
from sie.ipc.messages import LoadProgress, ModelEntry, Models, WorkerEntry
from sie.native.preempt import free
from sie.runtime.gil_stalls import seconds_to_read
from sie.runtime.logs import get_logger
from sie.values.errors import (
    ModelLoadFailed,
    SieError,
    Unavailable,
    WireError,
    from_wire,
    reason_not_loaded,
    text_without_paths,
    without_paths,
)
from sie.values.fallbacks import Fallback
from sie.values.inference import DEFAULT_MODEL

_log = get_logger(__name__)
T = TypeVar("T")
_ASK_AGAIN_S = 1.0
"""Time after which a load is requested again."""


class Hosts(Protocol):
    """The hosts of a cluster that the running task's request may use. Other hosts may have the model in another state."""

    def check_serving(self, entry: ModelEntry) -> None:
        """Raise a SieError unless a host serves the model or restores it. Has a host load it, if one can."""
        ...


class ModelTable:
    """All models of the server. `entries` is replaced as a whole and keeps the order of the command line.

    `entries` has the ids that clients may request, including `id:profile`; `hosted` finds models by the workers' ids.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, ask_load: Callable[[str], None], *, loading_retry_after_s: int = 5
    ) -> None:
        """Start without models. Source of the default `Retry-After` of a loading model: SIE API reference, section 12."""
        self._pool = pool
        self.on_stall: Callable[[int], None] = lambda _seconds: None
        """Called with the number of seconds for which the event loop may stall from now on."""
        self.reads_tokenizers = True
        """Whether texts are tokenised in this process; a gateway's hosts do that."""
        self.hosts: Hosts | None = None
        """In a gateway, what decides whether a model can be served."""
        self.default = ""
        """The setting `default_model`."""
        self.loading_retry_after_s = loading_retry_after_s
        self._ask_load = ask_load
        self._tokenizers: dict[str, tuple[str, asyncio.Future[Tokenizer]]] = {}
        self.entries: dict[str, ModelEntry] = {}
        self._hosted: dict[str, ModelEntry] = {}
        self._progress: dict[str, LoadProgress] = {}
        self.workers: tuple[WorkerEntry, ...] = ()
        self.is_ready = False
        self.reason = "starting"
        self.config_error = self.tls_error = ""
        self.created_s = int(time.time())
        self._changed = asyncio.Event()
        self.used: set[str] = set()
        """The ids of entries that were used since the last `take_used`."""

    def __contains__(self, model: object) -> bool:
        return model in self.entries

    @property
    def changed(self) -> asyncio.Event:
        """An event that the next update sets. Each update creates a new event."""
        return self._changed

    def update(self, message: Models) -> None:
        """Replace all entries with the supervisor's view."""
        entries = [_without_paths(entry) for entry in message.entries]
        self._hosted = {entry.card.id: entry for entry in entries}
        self.entries = {shown.card.id: shown for entry in entries for shown in _offered(entry)}
        self.workers = message.workers
        self.is_ready = message.ready
        self.reason = message.reason
        self.config_error, self.tls_error = message.config_error, message.tls_error
        for entry in self.entries.values():
            if self.reads_tokenizers and entry.card.tokenizer_file and entry.state in ("loading", "loaded"):
                self._start_tokenizer(entry)
        self._drop_tokenizers()
        self._progress = {model: progress for model, progress in self._progress.items() if self._is_loading(model)}
        self.announce()

    def set_progress(self, message: LoadProgress) -> None:
        """Record how far a load is. The next update that says that the model is not loading drops it."""
        self._progress[message.model] = message

    def progress_of(self, entry: ModelEntry) -> LoadProgress | None:
        """Return how far the load of a model is, or None if it is not loading."""
        model = model_of(entry.card.id)
        return self._progress.get(model) if self._is_loading(model) else None

    def _is_loading(self, model: str) -> bool:
        return model in self._hosted and self._hosted[model].state == "loading"

    def _drop_tokenizers(self) -> None:
        """Drop the tokenizers of removed models, and of models whose file may change before the next load."""
        idle = {name for name, entry in self.entries.items() if entry.state in ("unloading", "available")}
        gone = self._tokenizers.keys() - (self.entries.keys() | self._hosted.keys())
        gone |= self._tokenizers.keys() & (idle | {model_of(name) for name in idle})
        if gone:
            self._pool.submit(free, [self._tokenizers.pop(name) for name in gone])

    def announce(self) -> None:
        """Wake all waiters, after a change of models or when the server stops."""
        self._changed.set()
        self._changed = asyncio.Event()

    def find(self, model: str) -> ModelEntry | None:
        """Return a model's entry, or None for an unknown id. `id:default` means the model itself."""
        return self.entries.get(model) or self.entries.get(fold_default(model))

    def hosted(self, model: str) -> ModelEntry | None:
        """Return the entry of a model by the workers' id, even if clients cannot request that id."""
        return self._hosted.get(model)

    @property
    def hosted_entries(self) -> list[ModelEntry]:
        """Every model once, without its profiles."""
        return list(self._hosted.values())

    def take_used(self) -> tuple[str, ...]:
        """Return the models that were used since the last call."""
        used = tuple({model_of(entry_id) for entry_id in self.used})
        self.used.clear()
        return used

    def models_for(self, output: str) -> list[str]:
        """Return the ids of the models that give this output to a request without a profile.

        Text models also embed. They are listed for other outputs only if no other model gives those.
        """
        cards = [entry.card for entry in self.entries.values()]
        able = [card for card in cards if gives(card, output) and is_own_entry(card, self.entries)]
        made_for_it = [card for card in able if output == "generate" or card.kind != "generator"]
        return [card.id for card in made_for_it or able]

    def default_of(self, output: str = "") -> str | None:
        """Return the model for requests without one: the setting's if it is capable, or the only capable one, or None.

        Without an output, it is the default model of text generation, or without one, that of embeddings. If no model
        gives either, it is that of rerank. `/v1/models` shows it as its entry `default`.
        """
        chosen = self.find(self.default) if self.default else None
        if chosen is not None and (not output or not chosen.is_read or gives(chosen.card, output)):
            return chosen.card.id
        if not output:
            outputs = [served for served in ("generate", "dense") if self.models_for(served)] or ["score"]
            return next(filter(None, map(self.default_of, outputs)), None)
        able = self.models_for(output)
        return able[0] if len(able) == 1 else None

    def resolve_default(self, model: str, output: str) -> str:
        """Return the model id behind `default`. Raises SieError 404 with the list of capable models."""
        if model != DEFAULT_MODEL or model in self.entries:
            return model
        default = self.default_of(output)
        if default is None:
            able = ", ".join(self.models_for(output))
            lack = "no served model generates text" if output == "generate" else f"no model gives {output!r}"
            hint = f"; name one of: {able}" if able else f": {lack}"
            raise SieError(f"No default model{hint}", code="MODEL_NOT_FOUND", http_status=404)
        return default

    def check_serving(self, entry: ModelEntry) -> None:
        """Raise Unavailable or ModelLoadFailed unless the model can be served or is recovering.

        Requests a load if the model is not loaded. A tensor model must be loaded explicitly. A gateway raises the errors of
        `Hosts.check_serving`.
        """
        if self.hosts is not None:
            self.hosts.check_serving(entry)
            return
        if entry.workers and entry.state == "loaded":
            self.used.add(entry.card.id)
            return
        if entry.recovering:
            return
        model = entry.card.id
        if entry.state == "unloading":
            raise Unavailable(f"Model '{model}' is unloading", code="MODEL_NOT_LOADED")
        if entry.card.kind == "tensor" and entry.state == "available":
            raise Unavailable(f"Model '{model}' is not loaded", code="MODEL_NOT_LOADED")
        self._ask_load(model_of(model))
        if entry.state == "failed" and entry.error is not None:
            raise load_failure(model, entry.error)
        wait_s = self.loading_retry_after_s
        raise Unavailable(f"Model '{model}' is loading; retry in {wait_s} s", retry_after_s=wait_s)

    async def serving(self, entry: ModelEntry, deadline_ns: int, *, waits: bool) -> ModelEntry:
        """Return the entry of a model that can be served. waits decides whether to wait for a loading model.

        A reload is always waited for, because the request must be tokenised for the new model.
        """
        if waits or entry.reloading:
            return await self.wait_serving(entry, deadline_ns)
        self.check_serving(entry)
        return entry

    def current(self, entry: ModelEntry) -> ModelEntry:
        """Return the present entry of a model. Raises NotFound if the model was removed."""
        now = self.entries.get(entry.card.id)
        if now is None and self.hosts is None:  # a host that leaves a cluster takes no model away
            raise model_not_found(entry.card.id, self.entries)
        return now or entry

    async def serve(
        self, entry: ModelEntry, deadline_ns: int, run: Callable[[ModelEntry], Awaitable[T]], *, waits: bool = True
    ) -> T:
        """Return the result of `run` with a model that can be served, and run it again if the model was unloaded before.

        Raises the errors of `serving` and run.
        """
        while True:
            entry = await self.serving(entry, deadline_ns, waits=waits)
            try:
                return await run(entry)
            except Unavailable as error:
                entry = self.reloaded(entry, error)

    async def wait_serving(self, entry: ModelEntry, deadline_ns: int) -> ModelEntry:
        """Return a model's entry once it can be served. Waits while the model is loading, unloading or reloading.

        Raises the errors of `check_serving`: at once for a failed load, or at the deadline for one under way; and NotFound
        if the model is removed meanwhile. The load is requested repeatedly, because a model may be loaded and unloaded
        again before this waiter notices.
        """
        while True:
            changed = self._changed
            try:
                self.check_serving(entry)
            except Unavailable as error:
                left_s = (deadline_ns - time.monotonic_ns()) / 1e9
                is_lasting = error.code != Unavailable.code and not entry.reloading and entry.state != "unloading"
                if is_lasting or left_s <= 0:
                    raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), min(left_s, _ASK_AGAIN_S))
            else:
                return entry
            entry = self.current(entry)

    def reloaded(self, entry: ModelEntry, error: Unavailable) -> ModelEntry:
        """Return a model's current entry if the server unloaded it before the request ran. Otherwise raise the error.

        It may have been reloaded, or have made room for another model. What an administrator unloads is not tried again.
        """
        now, may_run_again = self.find(entry.card.id), error.code == "MODEL_NOT_LOADED" and error.may_be_repeated
        if not may_run_again or now is None or (now.dismissed and not now.workers):
            raise error
        return now

    async def wait_changed(self) -> None:
        """Wait for the supervisor's next update of any model."""
        await self._changed.wait()

    async def tokenizer(self, entry: ModelEntry) -> Tokenizer:
        """Return a model's tokenizer. Raises Internal if its file cannot be read."""
        # Shielded, because other requests may wait for the same future.
        return await asyncio.shield(self._start_tokenizer(entry))

    def ready_tokenizer(self, entry: ModelEntry) -> Tokenizer | None:
        """Return a model's tokenizer without waiting, or None if it is not read yet."""
        known = self._tokenizers.get(entry.card.id)
        if known is None or known[0] != entry.card.tokenizer_file or not known[1].done() or _has_failed(known[1]):
            return None
        return known[1].result()

    def _start_tokenizer(self, entry: ModelEntry) -> asyncio.Future[Tokenizer]:
        card, model = entry.card, model_of(entry.card.id)
        known = self._tokenizers.get(model)
        if known is None or known[0] != card.tokenizer_file or _has_failed(known[1]):
            self._announce_stall(card.tokenizer_file)
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._pool, Tokenizer.load, card, loop)
            future.add_done_callback(_note_failure)
            known = self._tokenizers[model] = (card.tokenizer_file, future)
        self._tokenizers[card.id] = known  # profiles share their model's tokenizer
        return known[1]

    def _announce_stall(self, path: str) -> None:
        """Announce a stall of the event loop: reading a large tokenizer holds the GIL where it cannot be preempted."""
        if seconds := seconds_to_read(path):
            self.on_stall(seconds)


def load_failure(model: str, wire: WireError) -> ModelLoadFailed:
    """Return the error of a request for a model whose load ended with `wire`."""
    error = from_wire(wire)
    reason = reason_not_loaded(model_of(model), error.message)
    return ModelLoadFailed(f"Model '{model}' failed to load: {reason}", extras=error.extras)


def _offered(entry: ModelEntry) -> list[ModelEntry]:
    """Return one entry for each profile of a model."""
    return [
        entry if card is entry.card else msgspec.structs.replace(entry, card=card) for card in entry_cards(entry.card)
    ]


def _without_paths(entry: ModelEntry) -> ModelEntry:
    """Return the entry with the server's file paths removed from its errors and reasons."""
    if entry.error is None and not entry.fallbacks and not any(adapter.error for adapter in entry.adapters.values()):
        return entry
    adapters = {
        name: msgspec.structs.replace(adapter, error=without_paths(adapter.error)) if adapter.error else adapter
        for name, adapter in entry.adapters.items()
    }
    error = without_paths(entry.error) if entry.error else None
    fallbacks = tuple(Fallback(one.name, text_without_paths(one.reason)) for one in entry.fallbacks)
    return msgspec.structs.replace(entry, error=error, adapters=adapters, fallbacks=fallbacks)


def _has_failed(future: asyncio.Future[Tokenizer]) -> bool:
    return future.done() and future.exception() is not None


def _note_failure(future: asyncio.Future[Tokenizer]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        _log.error("%s", error)
