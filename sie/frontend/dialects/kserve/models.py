"""Describes the server, its models, their states and statistics in the messages of KServe v2, as plain values.

Pure. Sources: Open Inference Protocol v2; Triton's model repository and statistics extensions; OpenVINO Model Server's
configuration API.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from sie import __version__
from sie.frontend.inputs.bounded_json import decode_typed
from sie.frontend.tensors.states import ModelStatistics, Spent, VersionState
from sie.values.card import ModelState
from sie.values.errors import BadRequest
from sie.values.tensor import TensorRule, TensorSpec

EXTENSIONS: Final = ("classification", "model_repository", "schedule_policy", "model_configuration", "system_shared_memory", "binary_tensor_data", "parameters",
                     "statistics")  # fmt: skip
_INDEX_STATES: Final[dict[ModelState, str]] = {
    "loaded": "READY", "loading": "LOADING", "unloading": "UNLOADING", "failed": "UNAVAILABLE", "available": "UNAVAILABLE",
}  # fmt: skip
_CONFIG_STATES: Final[dict[ModelState, str]] = {
    "loaded": "AVAILABLE", "loading": "LOADING", "unloading": "UNLOADING", "failed": "LOADING", "available": "END",
}  # fmt: skip


class _IndexBody(msgspec.Struct):
    ready: bool = False


class _ManageBody(msgspec.Struct):
    parameters: dict[Annotated[str, msgspec.Meta(max_length=256)], Any] = {}


class RegionBody(msgspec.Struct):
    """A region of shared memory to register."""

    key: str
    byte_size: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    offset: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


_INDEX: Final = msgspec.json.Decoder(_IndexBody)
_REGION: Final = msgspec.json.Decoder(RegionBody)
_MANAGE: Final = msgspec.json.Decoder(_ManageBody)


def server_metadata(name: str) -> dict[str, Any]:
    """Return the protocol's ServerMetadataResponse."""
    return {"name": name, "version": __version__, "extensions": EXTENSIONS}


def model_metadata(rule: TensorRule, versions: Sequence[str]) -> dict[str, Any]:
    """Return the protocol's ModelMetadataResponse."""
    return {
        "name": rule.name, "versions": versions, "platform": rule.platform,
        "inputs": [_spec(spec) for spec in rule.inputs], "outputs": [_spec(spec) for spec in rule.outputs],
    }  # fmt: skip


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}


def decode_index(body: bytes) -> bool:
    """Return whether a request asks only for ready models. Raises BadRequest."""
    return decode_typed(_INDEX, body).ready if body else False


def index_entries(states: Iterable[VersionState], *, only_ready: bool) -> list[dict[str, str]]:
    """Return the protocol's ModelIndex of each version. A model that was never loaded is listed once, by name only."""
    entries: list[dict[str, str]] = []
    for found in states:
        state = _INDEX_STATES[found.state]
        if only_ready and state != "READY":
            continue
        entry = {"name": found.name}
        if found.state != "available" or found.reason:
            entry |= {"version": found.version, "state": state, "reason": found.reason}
        if entry not in entries[-1:]:
            entries.append(entry)
    return entries


def decode_manage(body: bytes) -> Mapping[str, Any]:
    """Return the parameters of a load or an unload. Raises BadRequest."""
    return decode_typed(_MANAGE, body).parameters if body else {}


def decode_region(body: bytes) -> RegionBody:
    """Decode the body of a registration of shared memory. Raises BadRequest."""
    return decode_typed(_REGION, body)


def check_manage(parameters: Mapping[str, Any], action: str) -> None:
    """Raise BadRequest for a parameter that a load or an unload does not have; action is `load` or `unload`.

    A configuration or files in the request are refused, because they would be a second way to put models on the host.
    """
    for name, value in parameters.items():
        if action != "unload" or name != "unload_dependents":
            raise _refused_parameter(name)
        if not isinstance(value, bool):
            raise BadRequest(f"parameter '{name}' must be a bool")


def _refused_parameter(name: str) -> BadRequest:
    if name == "config" or name.startswith("file:"):
        return BadRequest(f"parameter '{name}' is not supported: models come from the directory model_repository alone")
    return BadRequest(f"unrecognized parameter '{name}'")


def statistics(by_version: Mapping[tuple[str, str], ModelStatistics]) -> dict[str, Any]:
    """Return the protocol's ModelStatisticsResponse; the keys of by_version are (name, version)."""
    return {"model_stats": [_statistics(*key, found) for key, found in by_version.items()]}


def _statistics(name: str, version: str, found: ModelStatistics) -> dict[str, Any]:
    return {
        "name": name,
        "version": version,
        "last_inference": found.last_used_ms,
        "inference_count": found.num_rows,
        "execution_count": found.num_steps,
        "inference_stats": {
            "success": {"count": found.num_succeeded, "ns": found.success_ns},
            "fail": {"count": found.num_failed, "ns": found.failure_ns},
            "queue": {"count": found.num_succeeded, "ns": found.queue_ns},
            "compute_input": {"count": found.num_succeeded, "ns": found.input_ns},
            "compute_infer": {"count": found.num_succeeded, "ns": found.infer_ns},
            "compute_output": {"count": found.num_succeeded, "ns": found.output_ns},
            "cache_hit": {"count": 0, "ns": 0},
            "cache_miss": {"count": 0, "ns": 0},
        },
        "response_stats": {},
        "batch_stats": [_batch_statistics(*size) for size in found.steps.items()],
        "memory_usage": [{"type": found.device, "id": 0, "byte_size": found.memory_bytes}]
        if found.memory_bytes
        else [],
    }


def _batch_statistics(num_rows: int, steps: Spent) -> dict[str, Any]:
    return {
        "batch_size": num_rows,
        "compute_input": {"count": steps.count, "ns": steps.input_ns},
        "compute_infer": {"count": steps.count, "ns": steps.infer_ns},
        "compute_output": {"count": steps.count, "ns": steps.output_ns},
    }


def config_statuses(states: Iterable[VersionState]) -> dict[str, Any]:
    """Return OVMS's answer to `GET /v1/config`: the state of every version by model."""
    models: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for found in states:
        status = {"error_code": "UNKNOWN", "error_message": found.reason} if found.reason else \
                 {"error_code": "OK", "error_message": "OK"}  # fmt: skip
        versions = models.setdefault(found.name, {"model_version_status": []})["model_version_status"]
        versions.append({"version": found.version, "state": _CONFIG_STATES[found.state], "status": status})
    return models
