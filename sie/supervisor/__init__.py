"""The supervisor: starts, watches, restarts and drains the other processes. Never imports torch, serves no HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sie.catalog.directory import read_card
from sie.catalog.spec import ModelSpec
from sie.catalog.stub import stub_card
from sie.errors import SieError
from sie.logs import configure
from sie.model_list import check_models
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
from sie.types import ModelCard


def main(loaded: Loaded, reload: Callable[[], Loaded]) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status. Raises StartError for what stops a start.

    reload returns the settings as a start would find them now; it is called on SIGHUP, and raises SettingsError.
    """
    settings = loaded.settings
    server = settings.server
    configure(server.log_format, server.log_level, "supervisor")
    dump_stacks_on_abort()  # what systemd's watchdog sends
    models = _read_models(loaded)
    with reserve_port(server.host, server.port) as held:
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
                return Reading(fresh.settings, _read_models(fresh))

            async def serve() -> int:
                supervisor = Supervisor(
                    settings,
                    models=models,
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


def _read_local_card(spec: ModelSpec) -> ModelCard | None:
    if spec.stub is not None:
        return stub_card(spec)
    card = None if spec.directory is None else read_card(spec, spec.directory)
    return card if card is not None and card.tokenizer_file else None
