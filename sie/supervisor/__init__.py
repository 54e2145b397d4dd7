"""The supervisor: starts, watches, restarts and drains the other processes. Never imports torch, serves no HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from sie import failpoints
from sie.catalog.cards import make_card
from sie.catalog.lora import find_lora_weights, read_lora_config
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import with_num_weights
from sie.errors import SieError
from sie.logs import configure
from sie.model_list import check_adapters, check_models
from sie.progress import Progress
from sie.settings import Loaded, Settings
from sie.shm.segment import ReservationError, check_reservation
from sie.supervisor.devices import resolve_devices
from sie.supervisor.host import StartError, make_runtime_dir, reserve_port, take_lock, usable_cores
from sie.supervisor.server import Supervisor
from sie.types import AdapterSpec, ModelCard

_CORES_PER_FRONTEND = 4


def main(loaded: Loaded) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status. Raises StartError for what stops a start."""
    settings = loaded.settings
    server = settings.server
    configure(server.log_format, server.log_level, "supervisor")
    _check_failpoints(loaded)
    models = _read_models(loaded)
    adapters = _read_adapters(loaded)
    with reserve_port(server.host, server.port) as held:
        port = held.getsockname()[1]
        base = Path(server.runtime_dir)
        runtime_dir = make_runtime_dir(base)
        lock = take_lock(base, port)
        try:
            places = resolve_devices(settings.devices.devices, settings.devices.resolve_timeout_s)
            num_frontends = server.frontends or max(1, len(usable_cores()) // _CORES_PER_FRONTEND)
            _check_memory(settings, num_frontends, len(places))
            progress = Progress(sys.stderr, server.log_format)

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


def _read_models(loaded: Loaded) -> list[tuple[ModelSpec, bool, ModelCard | None]]:
    """Return (spec, whether to load before readiness, card) of every model that settings name.

    The card of a model that has to be fetched or converted first is None. Raises StartError for a model that can
    never be served.
    """
    models: list[tuple[ModelSpec, bool, ModelCard | None]] = []
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


def _check_memory(settings: Settings, num_frontends: int, num_workers: int) -> None:
    """Refuse a start whose shared memory the host does not have, naming the bytes."""
    memory = settings.memory
    pairs = num_frontends * num_workers
    rings = 2 * pairs * memory.ring_capacity * 64
    pages = (1 + num_frontends + num_workers) * memory.counter_page_bytes
    total = num_frontends * memory.request_segment_bytes + pairs * memory.reply_segment_bytes + rings + pages
    check_reservation(total)
