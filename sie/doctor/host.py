"""Checks limits, memory, disk, port and clock of this host."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from sie.catalog.spec import ModelSpec
from sie.config.limits import MIB
from sie.config.settings import Settings
from sie.doctor import gpu
from sie.doctor.finding import Finding
from sie.runtime.server_locks import find_server
from sie.shm.segment import ReservationError, check_reservation
from sie.supervisor.host_resources import (
    StartError,
    check_private,
    count_frontends,
    reserve_port,
    reserved_bytes,
)
from sie.values.errors import SieError
from sie.workers.prepared.folder import measure_folder, weights_folder

_GIB = 1 << 30
_TIME_ERROR = 5
"""Return value of adjtimex(2) while the clock is not synchronised."""


def check_limits(settings: Settings) -> Iterator[Finding]:
    """Check this process's resource limits; under systemd the unit's limits apply."""
    yield _check_limit("open files", resource.RLIMIT_NOFILE, 8192, 512, "LimitNOFILE=65536, or `ulimit -n 65536`")
    yield _check_limit("processes and threads", resource.RLIMIT_NPROC, 4096, 64, "LimitNPROC=infinity, or `ulimit -u`")
    if gpu.wants_gpu(settings):
        fix = "LimitMEMLOCK=infinity, or `ulimit -l unlimited`"
        yield _check_limit("locked memory", resource.RLIMIT_MEMLOCK, 64 * MIB, 0, fix)


def _check_limit(name: str, number: int, enough: int, least: int, fix: str) -> Finding:
    soft, _ = resource.getrlimit(number)
    if soft == resource.RLIM_INFINITY or soft >= enough:
        shown = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        return Finding(area="limits", level="ok", message=f"{name}: {shown}")
    level = "error" if soft < least else "warn"
    return Finding(area="limits", level=level, message=f"{name}: {soft}, at least {enough} are wanted", fix=fix)


def check_memory(settings: Settings) -> Iterator[Finding]:
    """Check that the shared memory that a start reserves is available, and the later large payloads too."""
    memory = settings.memory
    needed = reserved_bytes(
        memory,
        count_frontends(settings.server.frontends) + bool(settings.server.grpc_port),
        gpu.count_workers(settings),
    )
    try:
        check_reservation(needed)
    except ReservationError as error:
        fix = "make request_segment_bytes or reply_segment_bytes smaller, or give the host or container more memory"
        yield Finding(area="memory", level="error", message=str(error), fix=fix)
        return
    yield Finding(area="memory", level="ok", message=f"{needed // MIB} MiB of shared memory fit")
    most = needed + memory.max_large_bytes + memory.max_pending_reply_bytes
    try:
        check_reservation(most)
    except ReservationError as error:
        fix = "lower max_large_bytes or max_pending_reply_bytes"
        yield Finding(area="memory", level="warn", message=f"large payloads may not fit: {error}", fix=fix)


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Check the directories that the server writes to."""
    yield _check_runtime_dir(Path(settings.server.runtime_dir or "."))
    yield _check_directory("cache_dir", Path(settings.models.cache_dir or "."), 64 * MIB)
    if settings.models.share_weights:
        yield _measure_weights(settings)
    if settings.generation.max_responses:
        yield _check_directory("state_dir", Path(settings.server.state_dir or "."), 64 * MIB)
    if _has_hub_models(settings):
        from huggingface_hub.constants import HF_HUB_CACHE

        yield _check_directory("models from the hub (HF_HOME)", Path(HF_HUB_CACHE), 20 * _GIB)


def _measure_weights(settings: Settings) -> Finding:
    path = weights_folder(settings.models)
    count, num_bytes = measure_folder(path)
    shown = f"{num_bytes / _GIB:.1f} of at most {settings.models.max_weights_bytes / _GIB:.1f} GiB"
    return Finding(area="disk", level="ok", message=f"prepared weights: {path}, {count} files, {shown}")


def _check_runtime_dir(path: Path) -> Finding:
    try:
        if path.exists():
            check_private(path)
    except (OSError, StartError) as error:
        fix = f"chmod 700 {path}, or name another directory with runtime_dir"
        return Finding(area="disk", level="error", message=str(error), fix=fix)
    return _check_directory("runtime_dir", path, MIB)


def _has_hub_models(settings: Settings) -> bool:
    from sie.catalog.spec import parse_model_spec

    def is_hub(spec: ModelSpec) -> bool:
        return spec.directory is None and spec.stub is None

    try:
        return any(is_hub(parse_model_spec(text)) for text in (*settings.models.preload, *settings.models.lazy))
    except SieError:  # the area `software` reports wrong settings
        return False


def _check_directory(name: str, path: Path, wanted_bytes: int) -> Finding:
    there = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
    if not os.access(there, os.W_OK | os.X_OK):
        fix = f"let uid {os.getuid()} write to {there}, or name another directory"
        return Finding(area="disk", level="error", message=f"{name}: {path} cannot be written to", fix=fix)
    free_bytes = shutil.disk_usage(there).free
    message = f"{name}: {path}, {free_bytes / _GIB:.1f} GiB free"
    if free_bytes >= wanted_bytes:
        return Finding(area="disk", level="ok", message=message)
    level = "error" if free_bytes < MIB else "warn"
    return Finding(
        area="disk", level=level, message=message, fix=f"make room: {wanted_bytes / _GIB:.1f} GiB are wanted"
    )


def check_network(settings: Settings) -> Iterator[Finding]:
    """Check that the port is free, or already served by this server."""
    server = settings.server
    if settings.access.uds:
        yield Finding(area="network", level="ok", message=f"no port: the Unix socket {settings.access.uds} is served")
        return
    try:
        reserve_port(server.host, server.port).close()
    except StartError as error:
        pid = find_server(server.runtime_dir, server.port)
        if pid is not None:
            message = f"port {server.port}: the server that runs has it (pid {pid})"
            yield Finding(area="network", level="ok", message=message)
        else:
            fix = f"`ss -ltnp 'sport = :{server.port}'` shows who has it; or set port or host"
            yield Finding(area="network", level="error", message=str(error), fix=fix)
    else:
        yield Finding(area="network", level="ok", message=f"{server.host}:{server.port} is free")


def check_clock(_settings: Settings) -> Iterator[Finding]:
    """Check that the clock is synchronised. Source: adjtimex(2)."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only reads
    if state == _TIME_ERROR:
        message = "the clock is not synchronised: times in logs and traces may not match other hosts'"
        yield Finding(area="clock", level="warn", message=message, fix="timedatectl set-ntp true, or start chrony")
    elif state < 0:
        yield Finding(area="clock", level="warn", message="the kernel does not say whether the clock is synchronised")
    else:
        yield Finding(area="clock", level="ok", message="synchronised")
