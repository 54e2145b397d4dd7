"""The supervisor: starts, watches, restarts and drains the other processes. Never imports torch, serves no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from sie.catalog.listing import check_adapters, check_models
from sie.catalog.lora import find_lora_weights, read_lora_config
from sie.config.mcp_config import read_mcp_config
from sie.config.settings import Access, Loaded, Settings
from sie.runtime import failpoints
from sie.runtime.child_setup import dump_stacks_on_abort, exclude_imports_from_collections
from sie.runtime.logs import configure, get_logger
from sie.runtime.progress import Progress
from sie.shm.segment import ReservationError, check_reservation
from sie.supervisor.certificates import open_certificates
from sie.supervisor.devices import WorkerSlot, resolve_devices
from sie.supervisor.host_resources import StartError, count_frontends, make_runtime_dir, reserved_bytes, take_lock
from sie.supervisor.key_file import KeyFileWatch
from sie.supervisor.listen import Listener, exposure_warnings, open_grpc_listener, open_listener
from sie.supervisor.loads import Models
from sie.supervisor.local_cards import read_local_card
from sie.supervisor.reload import Reading
from sie.supervisor.server import Supervisor
from sie.supervisor.tasks import check_tasks, needed_tasks
from sie.values.api_key import KeyFileError
from sie.values.card import AdapterSpec
from sie.values.errors import SieError

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
    _check_failpoints(loaded)
    _check_tracing(settings)
    _check_cluster(settings, is_gateway=is_gateway)
    _check_mcp("" if settings.agents.agent_socket else settings.agents.mcp_config)
    models = _read_models(loaded)
    adapters = _read_adapters(loaded, models)
    key_file = _open_key_file(settings.access.api_keys)
    certificates = open_certificates(settings.access)
    with contextlib.ExitStack() as held:
        listener, grpc_listener = _open_listeners(held, settings)
        base = Path(server.runtime_dir)
        runtime_dir = make_runtime_dir(base)
        lock = take_lock(base, listener.port) if listener.port else None
        try:
            places = [] if is_gateway else resolve_devices(settings.devices.devices, settings.devices.resolve_timeout_s)
            num_frontends = count_frontends(server.frontends)
            num_http = num_frontends + (certificates is not None)  # a stand-in serves during a renewal
            num_others = (grpc_listener is not None) + (bool(settings.cluster.nats) and not is_gateway)
            check_reservation(reserved_bytes(settings.memory, num_http + num_others, len(places)))
            check_tasks(_needed_tasks(settings, places, num_http, has_grpc=bool(num_others)))
            progress = Progress(sys.stderr, server.log_format)

            def reread() -> Reading:
                fresh = reload()
                found = _read_models(fresh)
                _read_adapters(fresh, found)  # only to raise the errors of a start: a reload changes no adapter
                return Reading(fresh.settings, found)

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
                    progress=progress,
                    key_file=key_file,
                    certificates=certificates,
                    is_gateway=is_gateway,
                    reread=reread,
                )
                return await supervisor.run()

            return asyncio.run(serve())
        except ReservationError as error:
            raise StartError(f"shared memory: {error}") from error
        finally:
            if lock is not None:
                os.close(lock)


def _open_listeners(held: contextlib.ExitStack, settings: Settings) -> tuple[Listener, Listener | None]:
    """Open the HTTP and gRPC listeners until held is closed, and warn about addresses that other hosts can reach."""
    listener = held.enter_context(contextlib.closing(open_listener(settings.server, settings.access)))
    grpc_listener = open_grpc_listener(settings.server, settings.access)
    if grpc_listener is not None:
        held.enter_context(contextlib.closing(grpc_listener))
    for warning in _exposure(listener, grpc_listener, settings.access):
        _log.warning("%s", warning)
    return listener, grpc_listener


def _needed_tasks(settings: Settings, places: list[WorkerSlot], num_frontends: int, *, has_grpc: bool) -> int:
    num_threads = settings.devices.threads_per_worker or max((len(place.cores) for place in places), default=1)
    return needed_tasks(num_frontends, len(places), num_threads, has_grpc=has_grpc)


def _exposure(listener: Listener, grpc_listener: Listener | None, access: Access) -> list[str]:
    """Return the warnings about addresses that other hosts can reach."""
    warnings = exposure_warnings(listener.address, access)
    if grpc_listener is not None and (access.uds or grpc_listener.address != listener.address):
        warnings += exposure_warnings(grpc_listener.address, msgspec.structs.replace(access, uds=""))
    return warnings


def _check_tracing(settings: Settings) -> None:
    """Raise StartError if tracing is enabled and its packages are missing."""
    if not settings.tracing.enabled:
        return
    names = ("opentelemetry.sdk", f"opentelemetry.exporter.otlp.proto.{settings.tracing.protocol}")
    try:
        is_there = all(importlib.util.find_spec(name) for name in names)
    except ModuleNotFoundError:  # find_spec imports the parent packages
        is_there = False
    if not is_there:
        raise StartError("tracing: OpenTelemetry is not installed; pip install 'ringserve[otel]'")


def _check_cluster(settings: Settings, *, is_gateway: bool) -> None:
    """Raise StartError for a gateway without NATS or with a listener it does not have, and if the client is missing."""
    if is_gateway and not settings.cluster.nats:
        raise StartError("nats: a gateway needs the address of NATS (--nats nats://HOST:4222)")
    if is_gateway and settings.server.grpc_port:
        raise StartError("grpc_port: a gateway serves no gRPC")
    if settings.cluster.nats and importlib.util.find_spec("nats") is None:
        raise StartError("nats: the NATS client is not installed; pip install 'ringserve[cluster]'")


def _check_failpoints(loaded: Loaded) -> None:
    for text in loaded.settings.testing.failpoints:
        try:
            failpoints.parse(text)
        except ValueError as error:
            raise StartError(f"failpoints (from {loaded.sources['failpoints']}): {error}") from error


def _read_models(loaded: Loaded) -> Models:
    """Return (spec, whether to load before readiness, card) of every model in the settings.

    The card is None for a model that must first be fetched or converted. Raises StartError for a model that can never
    be served.
    """
    models: Models = []
    for spec, start in check_models(loaded).values():
        try:
            card = read_local_card(spec, loaded.settings)
        except SieError as error:
            raise StartError(f"{'model' if start == 'preload' else 'lazy_model'}: {error.message}") from error
        models.append((spec, start == "preload", card))
    return models


def _read_adapters(loaded: Loaded, models: Models) -> list[AdapterSpec]:
    """Return every adapter in the settings.

    Raises StartError for an adapter that can never be served because of its files or its model's kind.
    """
    adapters = check_adapters(loaded)
    cards = {spec.id: card for spec, _, card in models}
    for spec in adapters:
        card = cards.get(spec.model)
        if card is not None and card.kind not in ("encoder", "stub"):
            raise StartError(
                f"lora: Adapter '{spec.id}' cannot be loaded: model '{spec.model}' is not a text encoder ({card.kind}), "
                "and only text encoders run with adapters"
            )
        if spec.directory is None:
            continue
        try:
            read_lora_config(spec.id, spec.directory)
            find_lora_weights(spec.id, spec.directory)
        except SieError as error:
            raise StartError(f"lora: {error.message}") from error
    return adapters


def _open_key_file(path: str) -> KeyFileWatch | None:
    """Return the watched API key file, or None if the server needs no keys. Raises StartError."""
    try:
        return KeyFileWatch(path) if path else None
    except KeyFileError as error:
        raise StartError(f"api_keys: {error}") from error


def _check_mcp(path: str) -> None:
    """Raise StartError for a file of MCP servers that cannot be used."""
    if not path:
        return
    if importlib.util.find_spec("mcp") is None:
        raise StartError("mcp_config: the MCP client is not installed; pip install 'ringserve[mcp]'")
    try:
        read_mcp_config(path)
    except OSError as error:
        raise StartError(f"mcp_config: {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StartError(f"mcp_config: {path}: {error}") from None
