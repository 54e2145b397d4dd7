"""Describes a cluster for people and clients: its hosts and models, as `/health` and `/ws/cluster-status` show them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sie.cluster.gateway.host_directory import Host
from sie.ipc.messages import ModelEntry


def cluster_status(hosts: Sequence[Host], entries: Iterable[ModelEntry]) -> dict[str, Any]:
    """Return the members `cluster`, `workers` and `models`. Source: SIE API reference, section 14."""
    models = [_model(entry, hosts) for entry in entries]
    return {
        "cluster": {
            "worker_count": len(hosts),
            "gpu_count": sum(host.beat.num_gpus for host in hosts),
            "models_loaded": sum(model["state"] == "loaded" for model in models),
            "total_qps": round(sum(host.beat.items_per_s for host in hosts), 2),
        },
        "workers": [_worker(host) for host in hosts],
        "models": models,
    }


def _worker(host: Host) -> dict[str, Any]:
    beat = host.beat
    return {
        "name": beat.name, "url": beat.url, "gpu": beat.profile, "gpu_count": beat.num_gpus, "pool": beat.pool,
        "loaded_models": sorted(name for name, model in beat.models.items() if model.is_served),
        "queue_depth": beat.num_running, "memory_used_bytes": beat.memory_used_bytes,
        "memory_total_bytes": beat.memory_total_bytes, "healthy": not beat.is_draining, "bundle": beat.bundle,
        "bundle_config_hash": beat.config_hash, "ready_gpu_slots": beat.num_workers, "pending_cost": beat.queued_tokens,
        "inflight_batches": beat.num_running, "active_generations": beat.num_texts,
    }  # fmt: skip


def _model(entry: ModelEntry, hosts: Sequence[Host]) -> dict[str, Any]:
    serving = [host for host in hosts if host.serves(entry.card.id)]
    return {
        "name": entry.card.id,
        "state": "loaded" if serving else "available",
        "worker_count": len(serving),
        "gpu_types": sorted({host.lane.profile for host in serving}),
        "total_queue_depth": sum(host.beat.num_running for host in serving),
    }
