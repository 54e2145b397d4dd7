"""Builds the frame of `/ws/status`, the current state of the server. Pure, except `process_owner` and `server_facts`.

`sie.frontend.telemetry.status_hub` sends it. Source of the format: SIE API reference, section 14. If readers disagree on a
key, the frame has both keys.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from sie import __version__
from sie.catalog.profiles import model_of
from sie.config.settings import Settings
from sie.frontend.telemetry.metrics import Merged, cumulative
from sie.ipc.messages import Launch, LoadPoint, ModelEntry, WorkerEntry
from sie.metrics import definitions
from sie.shm.pages import Labels

GPU_STALE_AFTER_S = 5.0
"""An older GPU sample is marked stale: the driver's call or the worker is stuck."""
_DEGRADED_SHARE = 0.01
"""A model is degraded if a larger share of its latest sequences had non-finite values."""

_COUNTERS: Final = tuple(
    family
    for family in definitions.FAMILIES
    if family.kind == "counter" and "model" in family.labels and family.name.startswith("sie_")
)
"""The counters that a frame reports for each model."""
_GENERATION: Final = {
    "running": definitions.SEQUENCES_RUNNING,
    "waiting": definitions.SEQUENCES_WAITING,
    "kv_blocks_used": definitions.KV_BLOCKS_USED,
    "kv_blocks": definitions.KV_BLOCKS,
}
"""The figures that a frame reports for each text model, summed over its workers."""
_HISTOGRAMS: Final = (
    definitions.REQUEST_DURATION,
    definitions.BATCH_SIZE,
    definitions.FIRST_TOKEN,
    definitions.TOKEN_GAP,
)


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that stay constant while the server runs. pid is the supervisor's."""

    name: str
    version: str
    pid: int
    user: str = ""
    working_dir: str = ""
    machine_profile: str = ""
    pool_name: str = ""
    bundle: str = ""
    bundle_config_hash: str = ""
    max_batch_requests: int = 64
    memory_threshold_pct: float = 95.0


def server_facts(settings: Settings, launch: Launch) -> ServerFacts:
    """Return the facts of this server, from its settings and launch record."""
    user, working_dir = process_owner()
    return ServerFacts(
        name=settings.server.name or socket.gethostname(),
        version=__version__,
        pid=launch.supervisor_pid,
        user=user,
        working_dir=working_dir,
        machine_profile=settings.server.machine_profile,
        pool_name=settings.server.pool_name,
        bundle=settings.server.bundle,
        max_batch_requests=settings.scheduler.max_step_items,
        memory_threshold_pct=settings.models.memory_pressure_pct,
    )


class StatusInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a frame.

    reason: why the server is not ready; config_error: why a reload was refused; keys_error: why the last change of the
    API key file was refused; tls_error: why the last change of the certificate was refused.
    """

    server: ServerFacts
    uptime_s: float = 0.0
    ready: bool
    models: tuple[ModelEntry, ...]
    workers: tuple[WorkerEntry, ...]
    metrics: Merged
    saturated: bool = False
    reason: str = ""
    config_error: str = ""
    keys_error: str = ""
    tls_error: str = ""


def process_owner() -> tuple[str, str]:
    """Return (user name, working directory) of this process; the user's number if it has no name."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers often run under numbers without a passwd entry
        user = str(os.getuid())
    return user, str(Path.cwd())


def build_status(inputs: StatusInputs, now_s: float) -> dict[str, Any]:
    """Return one frame. now_s is Unix time.

    Beyond the reference's fields: `reason`, `config_error`, `keys_error`, `tls_error`, `workers`, `outcomes` (requests by status),
    `refusals` (by reason), `worker_restarts`, `extents_in_use`, `agents_running`, `event_loop_lag_s`, `degraded` of each model, `generation` of
    those that generate, and `uuid`, `healthy`, `stale` of each GPU.
    """
    server, metrics = inputs.server, inputs.metrics
    gpus = _gpus(metrics, server.memory_threshold_pct, now_s)
    gpu_type = gpus[0]["gpu_type"] if gpus else ""
    return {
        "timestamp": now_s,
        "ready": inputs.ready,
        "reason": inputs.reason,
        "config_error": inputs.config_error or None,
        "keys_error": inputs.keys_error or None,
        "tls_error": inputs.tls_error or None,
        "name": server.name,
        "machine_profile": server.machine_profile or gpu_type,
        "pool_name": server.pool_name,
        "gpu": gpu_type,
        "gpu_count": len(gpus),
        "bundle": server.bundle,
        "bundle_config_hash": server.bundle_config_hash,
        "loaded_models": [entry.card.id for entry in inputs.models if entry.state == "loaded"],
        "max_batch_requests": server.max_batch_requests,
        "saturated": inputs.saturated,
        "server": {
            "version": server.version,
            "uptime_seconds": int(inputs.uptime_s),
            "user": server.user,
            "working_dir": server.working_dir,
            "pid": server.pid,
        },
        "gpus": gpus,
        "models": _models(inputs.models, metrics),
        "workers": [_worker(entry, metrics) for entry in inputs.workers],
        "counters": {family.name.removesuffix("_total"): _sum_by(metrics, family, "model") for family in _COUNTERS},
        "histograms": {family.name: _histograms(metrics, family) for family in _HISTOGRAMS},
        "outcomes": _sum_by(metrics, definitions.REQUESTS, "status"),
        "refusals": _sum_by(metrics, definitions.REFUSALS, "reason"),
        "worker_restarts": sum(_sum_by(metrics, definitions.WORKER_RESTARTS, "worker").values()),
        "extents_in_use": _sum_by(metrics, definitions.EXTENTS_IN_USE, "segment"),
        "agents_running": int(metrics[definitions.AGENTS_RUNNING.name].get((), [0.0])[0]),
        "event_loop_lag_s": metrics[definitions.LOOP_LAG_LATEST.name].get((), [0.0])[0],
    }


def _gpus(metrics: Merged, threshold_pct: float, now_s: float) -> list[dict[str, Any]]:
    """Return the devices in index order, from the gauges of `sie.workers.telemetry`."""
    totals = metrics[definitions.GPU_MEMORY_TOTAL.name]
    # A total of 0 is left from the device that this worker slot had before its restart.
    present = sorted((labels for labels, values in totals.items() if values[0] > 0), key=_gpu_order)
    return [_gpu(metrics, labels, threshold_pct, now_s) for labels in present]


def _gpu_order(labels: Labels) -> tuple[int, str]:
    names = dict(labels)
    return int(names["index"]), names["uuid"]


def _gpu(metrics: Merged, labels: Labels, threshold_pct: float, now_s: float) -> dict[str, Any]:
    def value(family: definitions.Family) -> float | None:
        values = metrics[family.name].get(labels)
        return None if values is None else values[0]

    names = dict(labels)
    utilization = _whole(value(definitions.GPU_UTILIZATION))
    return {
        "device": names["device"],
        "index": int(names["index"]),
        "name": names["name"],
        "gpu_type": names["gpu_type"],
        "uuid": names["uuid"],
        "utilization_pct": utilization,
        "utilization_percent": utilization,
        "memory_used_bytes": _whole(value(definitions.GPU_MEMORY_USED)),
        "memory_total_bytes": _whole(value(definitions.GPU_MEMORY_TOTAL)),
        "memory_threshold_pct": threshold_pct,
        "temperature_c": _whole(value(definitions.GPU_TEMPERATURE)),
        "healthy": value(definitions.GPU_UP) == 1,
        "stale": now_s - (value(definitions.GPU_SAMPLED) or 0.0) > GPU_STALE_AFTER_S,
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _models(entries: tuple[ModelEntry, ...], metrics: Merged) -> list[dict[str, Any]]:
    waiting = _sum_by(metrics, definitions.QUEUE_DEPTH, "model")
    spoilt = _sum_by(metrics, definitions.NON_FINITE_SHARE, "model")
    generation = {key: _sum_by(metrics, family, "model") for key, family in _GENERATION.items()}
    counted: set[str] = set()
    models: list[dict[str, Any]] = []
    for entry in entries:
        shared = model_of(entry.card.id)
        model = _model(entry, int(waiting.get(shared, 0)), spoilt.get(shared, 0.0) > _DEGRADED_SHARE)
        if shared in counted:  # profiles of a model share its memory and queue; readers sum over models
            model.update(memory_bytes=0, queue_depth=0, queue_pending_items=0)
        elif entry.card.generate is not None:
            model["generation"] = {key: int(values.get(shared, 0)) for key, values in generation.items()}
        counted.add(shared)
        models.append(model)
    return sorted(models, key=lambda model: (-model["memory_bytes"], model["name"]))


def _model(entry: ModelEntry, num_waiting: int, is_degraded: bool) -> dict[str, Any]:
    card = entry.card
    return {
        "name": card.id,
        "state": entry.state,
        "device": entry.device or None,
        "memory_bytes": entry.memory_bytes,
        "config": {
            "hf_id": None if card.kind == "stub" else model_of(card.id),
            "adapter": card.architecture or card.kind,
            "inputs": card.inputs,
            "outputs": card.wire_outputs,
            "dims": card.dims,
            "max_sequence_length": card.max_sequence_length,
        },
        # One queue, counted in items; the reference's readers use two names for it.
        "queue_depth": num_waiting,
        "queue_pending_items": num_waiting,
        "recovering": entry.recovering,
        "degraded": is_degraded,
        "preload": entry.preload,
        "loras": {name: adapter.state for name, adapter in entry.adapters.items()},
        "error": entry.error.message if entry.error else None,
    }


def _worker(entry: WorkerEntry, metrics: Merged) -> dict[str, Any]:
    """Return one worker slot. The growth of busy_seconds over time is the share of time that it computes."""
    labels = definitions.STEP_DURATION.label_pairs(str(entry.slot))
    steps = metrics[definitions.STEP_DURATION.name].get(labels, [0.0])
    tokens = metrics[definitions.STEP_TOKENS.name].get(labels, [0.0])
    return {
        "slot": entry.slot,
        "device": entry.device,
        "pid": entry.pid,
        "state": entry.state,
        "restarts": entry.restarts,
        "busy_seconds": steps[0],
        "num_steps": int(sum(steps[1:])),
        "num_tokens": int(tokens[0]),
    }


def _sum_by(metrics: Merged, family: definitions.Family, label: str) -> dict[str, float]:
    """Sum a family's samples over all labels except this one."""
    sums: dict[str, float] = {}
    for labels, values in metrics[family.name].items():
        key = dict(labels)[label]
        sums[key] = sums.get(key, 0.0) + values[0]
    return sums


def _histograms(metrics: Merged, family: definitions.Family) -> dict[str, dict[str, list[float]]]:
    """Return cumulative counts by model, without +Inf. A family with phases reports only `total`. Source: section 14."""
    sums: dict[str, list[float]] = {}
    for labels, values in metrics[family.name].items():
        names = dict(labels)
        if names.get("phase", "total") != "total":
            continue
        known = sums.get(names["model"])
        sums[names["model"]] = values if known is None else [a + b for a, b in zip(known, values, strict=True)]
    return {
        model: {"buckets": list(family.bounds), "counts": cumulative(values)[:-1]} for model, values in sums.items()
    }


def encode_frame(frame: dict[str, Any]) -> str:
    """Return the frame as the JSON text for all watchers."""
    return msgspec.json.encode(frame).decode()


def add_history(frame: str, points: Iterable[LoadPoint]) -> str:
    """Return the text of a frame with the field `history`, the load of the last hour, oldest first."""
    return f'{frame[:-1]},"history":{msgspec.json.encode(list(points)).decode()}}}'
