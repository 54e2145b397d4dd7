"""The supervisor's entry: checks the settings and the host, reads the models, opens the listeners, and serves."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from sie.config.settings import Access, Loaded, Settings
from sie.runtime.child_setup import dump_stacks_on_abort, exclude_imports_from_collections
from sie.runtime.logs import configure, get_logger
from sie.runtime.progress import Progress
from sie.runtime.termination import ended_by_sigterm
from sie.shm.segment import ReservationError, check_reservation
from sie.supervisor.certificates import open_certificates
from sie.supervisor.configured_models import read_adapters, read_models
from sie.supervisor.devices import WorkerSlot, resolve_devices
from sie.supervisor.host_resources import StartError, count_frontends, make_runtime_dir, reserved_bytes, take_lock
from sie.supervisor.key_file import KeyFileWatch
from sie.supervisor.listen import Listener, exposure_warnings, open_grpc_listener, open_listener
from sie.supervisor.reload import Reading
from sie.supervisor.server import Supervisor
from sie.supervisor.start_checks import check_start
from sie.supervisor.task_limits import check_tasks, needed_tasks
from sie.values.api_key import KeyFileError

_log = get_logger(__name__)


def main(loaded: Loaded, reload: Callable[[], Loaded], *, is_gateway: bool = False) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status. Raises StartError for a fault that prevents the start.

    is_gateway: start frontends without workers, whose operations run on the hosts of a cluster.

    reload returns the settings that a start would find now. It is called on SIGHUP and raises SettingsError.
    """
    settings = loaded.settings
    server = settings.server
    configure(server.log_format, server.log_level, "supervisor")
    exclude_imports_from_collections()
    dump_stacks_on_abort()  # systemd's watchdog sends SIGABRT
    check_start(loaded, is_gateway=is_gateway)
    models = read_models(loaded)
    adapters = read_adapters(loaded, models)
    key_file = _open_key_file(settings.access.api_keys)
    certificates = open_certificates(settings.access)
    with ended_by_sigterm(0), contextlib.ExitStack() as held:
        listener, grpc_listener = _open_listeners(held, settings)
        base = Path(server.runtime_dir)
        runtime_dir = held.enter_context(make_runtime_dir(base))
        if listener.port:
            held.enter_context(take_lock(base, listener.port))
        places = [] if is_gateway else resolve_devices(settings.devices.devices, settings.devices.resolve_timeout_s)
        num_frontends = count_frontends(server.frontends)
        num_http = num_frontends + (certificates is not None)  # a stand-in serves during a renewal
        num_others = (grpc_listener is not None) + (bool(settings.cluster.nats) and not is_gateway)

        async def serve() -> int:
            supervisor = Supervisor(
                settings,
                models=models,
                adapters=adapters,
                places=places,
                num_frontends=num_frontends,
                runtime_dir=runtime_dir,
                listener=listener,
                grpc_listener=grpc_listener,
                progress=Progress(sys.stderr, server.log_format),
                key_file=key_file,
                certificates=certificates,
                is_gateway=is_gateway,
                reread=lambda: _reread(reload),
            )
            return await supervisor.run()

        try:
            _check_resources(settings, places, num_http, num_others)
            return asyncio.run(serve())
        except ReservationError as error:
            raise StartError(f"shared memory: {error}") from error


def _reread(reload: Callable[[], Loaded]) -> Reading:
    """Return the settings and models that a start would read now. Raises SettingsError or StartError."""
    fresh = reload()
    models = read_models(fresh)
    read_adapters(fresh, models)  # only to raise the errors of a start: a reload changes no adapter
    return Reading(fresh.settings, models)


def _open_listeners(held: contextlib.ExitStack, settings: Settings) -> tuple[Listener, Listener | None]:
    """Open the HTTP and gRPC listeners until held is closed, and warn about addresses that other hosts can reach."""
    listener = held.enter_context(contextlib.closing(open_listener(settings.server, settings.access)))
    grpc_listener = open_grpc_listener(settings.server, settings.access)
    if grpc_listener is not None:
        held.enter_context(contextlib.closing(grpc_listener))
    for warning in _exposure(listener, grpc_listener, settings.access):
        _log.warning("%s", warning)
    return listener, grpc_listener


def _check_resources(settings: Settings, places: list[WorkerSlot], num_http: int, num_others: int) -> None:
    """Raise ReservationError if shared memory is too small, StartError for a limit on tasks.

    num_others: frontends that are not HTTP.
    """
    check_reservation(reserved_bytes(settings.memory, num_http + num_others, len(places)))
    num_threads = settings.devices.threads_per_worker or max((len(place.cores) for place in places), default=1)
    check_tasks(needed_tasks(num_http, len(places), num_threads, has_grpc=bool(num_others)))


def _exposure(listener: Listener, grpc_listener: Listener | None, access: Access) -> list[str]:
    """Return the warnings about addresses that other hosts can reach."""
    warnings = exposure_warnings(listener.address, access)
    if grpc_listener is not None and (access.uds or grpc_listener.address != listener.address):
        warnings += exposure_warnings(grpc_listener.address, msgspec.structs.replace(access, uds=""))
    return warnings


def _open_key_file(path: str) -> KeyFileWatch | None:
    """Return the watched API key file, or None if the server needs no keys. Raises StartError."""
    try:
        return KeyFileWatch(path) if path else None
    except KeyFileError as error:
        raise StartError(f"api_keys: {error}") from error
