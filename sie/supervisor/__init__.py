"""The supervisor: starts, watches, restarts and drains the other processes. Never imports torch, serves no HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sie import failpoints
from sie.cards import AdapterSpec, ModelCard
from sie.catalog.cards import make_card
from sie.catalog.lora import find_lora_weights, read_lora_config
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import with_num_weights
from sie.errors import SieError
from sie.logs import configure
from sie.model_list import check_adapters, check_models
from sie.process import dump_stacks_on_abort
from sie.progress import Progress
from sie.settings import Loaded
from sie.shm.segment import ReservationError, check_reservation
from sie.supervisor.devices import resolve_devices
from sie.supervisor.host import (
    StartError,
    count_frontends,
    make_runtime_dir,
    reserve_port,
    reserved_bytes,
    take_lock,
)
from sie.supervisor.loads import Models
from sie.supervisor.reload import Reading
from sie.supervisor.server import Supervisor


def main(loaded: Loaded, reload: Callable[[], Loaded]) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status. Raises StartError for what stops a start.

    reload returns the settings as a start would find them now; it is called on SIGHUP, and raises SettingsError.
    """
    settings = loaded.settings
    server = settings.server
    configure(server.log_format, server.log_level, "supervisor")
    dump_stacks_on_abort()  # what systemd's watchdog sends
    _check_failpoints(loaded)
    models = _read_models(loaded)
    adapters = _read_adapters(loaded)
    with reserve_port(server.host, server.port, Path(server.runtime_dir)) as held:
        port = held.getsockname()[1]
        base = Path(server.runtime_dir)
        runtime_dir = make_runtime_dir(base)
        lock = take_lock(base, port)
        try:
            places = resolve_devices(settings.devices.devices, settings.devices.resolve_timeout_s)
            num_frontends = count_frontends(server.frontends)
            check_reservation(reserved_bytes(settings.memory, num_frontends, len(places)))
            progress = Progress(sys.stderr, server.log_format)

            def reread() -> Reading:
                fresh = reload()
                _read_adapters(fresh)  # only for what would stop a start: adapters stay as they are
                return Reading(fresh.settings, _read_models(fresh))

            async def serve() -> int:
                supervisor = Supervisor(
                    settings,
                    models=models,
                    adapters=adapters,
                    places=places,
                    num_frontends=num_frontends,
                    runtime_dir=runtime_dir,
                    port=port,
                    progress=progress,
                    reread=reread,
                )
                return await supervisor.run()

            return asyncio.run(serve())
        except ReservationError as error:
            raise StartError(f"shared memory: {error}") from error
        finally:
            os.close(lock)


def _check_failpoints(loaded: Loaded) -> None:
    for text in loaded.settings.testing.failpoints:
        try:
            failpoints.parse(text)
        except SieError as error:
            raise StartError(f"failpoints (from {loaded.sources['failpoints']}): {error.message}") from error


def _read_models(loaded: Loaded) -> Models:
    """Return (spec, whether to load before readiness, card) of every model that settings name.

    The card of a model that has to be fetched or converted first is None. Raises StartError for a model that can
    never be served.
    """
    models: Models = []
    for spec, start in check_models(loaded).values():
        try:
            card = _read_local_card(spec)
        except SieError as error:
            raise StartError(f"{'model' if start == 'preload' else 'lazy_model'}: {error.message}") from error
        models.append((spec, start == "preload", card))
    return models


def _read_adapters(loaded: Loaded) -> list[AdapterSpec]:
    """Return every adapter that settings name. Raises StartError for one on disk that can never be served."""
    adapters = check_adapters(loaded)
    for spec in adapters:
        if spec.directory is None:
            continue
        try:
            read_lora_config(spec.id, spec.directory)
            find_lora_weights(spec.id, spec.directory)
        except SieError as error:
            raise StartError(f"lora: {error.message}") from error
    return adapters


def _read_local_card(spec: ModelSpec) -> ModelCard | None:
    if spec.stub is None and spec.directory is None:
        return None
    card = make_card(spec, spec.directory or "")
    return with_num_weights(card) if card.stub is not None or card.tokenizer_file else None
