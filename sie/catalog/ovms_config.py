"""Reads OpenVINO Model Server's configuration, `config.json`: models by name, where they are, and which versions they serve.

Fields about speed are ignored. Those that would change a model's answers are refused by name, for their model alone.
Source: OpenVINO Model Server, schema.cpp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from sie.catalog.model_config import ModelPolicy
from sie.values.errors import ModelLoadFailed, not_loaded

_MAX_BYTES: Final = 16 << 20
_Version = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_IGNORED: Final = frozenset({
    "name", "base_path", "model_version_policy", "nireq", "target_device", "plugin_config", "allow_cache", "batch_waiting_time",
    "max_sequence_number", "idle_sequence_cleanup", "low_latency_transformation", "stateful",
})  # fmt: skip
"""Fields that are followed, or that are about speed. `stateful` is looked at by itself."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {"batch_size": ("auto", "0", 0), "shape": ("auto",)}
"""The values of other fields that ask for what happens anyway: models take any size that their file takes."""


class _Latest(msgspec.Struct):
    num_versions: _Version = 1


class _Specific(msgspec.Struct):
    versions: list[_Version]


class _Policy(msgspec.Struct):
    latest: _Latest | None = None
    specific: _Specific | None = None
    all: dict[str, Any] | None = None


class _Named(msgspec.Struct):
    name: str
    base_path: str = ""
    model_version_policy: _Policy | None = None


class _Wrapped(msgspec.Struct):
    config: dict[str, Any]


class _Pipeline(msgspec.Struct):
    name: str


class _File(msgspec.Struct):
    model_config_list: list[_Wrapped] = []
    pipeline_config_list: list[_Pipeline] = []
    mediapipe_config_list: list[_Pipeline] = []
    custom_loader_config_list: list[Any] = []


class OvmsModel(msgspec.Struct, frozen=True):
    """One entry: the model's directory, and its policy (None: the latest version), or why it cannot be served."""

    name: str
    base: str = ""
    policy: ModelPolicy | None = None
    reason: str = ""


def read_ovms_config(path: Path) -> list[OvmsModel]:
    """Return the entries of a config.json, the first of each name. Raises ModelLoadFailed, naming the file and the field."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ModelLoadFailed(f"model_repository {path}: {error.strerror}") from error
    if len(raw) > _MAX_BYTES:
        raise ModelLoadFailed(f"model_repository {path} is over {_MAX_BYTES} bytes")
    try:
        found = msgspec.json.decode(raw, type=_File)
        models = [_read(path, each.config) for each in found.model_config_list]
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelLoadFailed(f"model_repository {path}: {error}") from None
    if found.custom_loader_config_list:
        raise ModelLoadFailed(f"model_repository {path}: custom_loader_config_list is not supported")
    models += [
        OvmsModel(each.name, reason=not_loaded(each.name, f"{field} is not supported"))
        for field in ("pipeline_config_list", "mediapipe_config_list")
        for each in getattr(found, field)
    ]
    return list({model.name: model for model in reversed(models)}.values())[::-1]


def _read(path: Path, config: dict[str, Any]) -> OvmsModel:
    named = msgspec.convert(config, _Named)
    refused = [field for field in config.keys() - _IGNORED if not _is_neutral(field, config[field])]
    if config.get("stateful"):
        refused.append("stateful")
    reason = f"{min(refused)} is not supported" if refused else "" if named.base_path else "base_path is missing"
    if "://" in named.base_path:
        reason = "base_path must be a directory of this host"
    if reason:
        return OvmsModel(named.name, reason=not_loaded(named.name, f"{path.name}: {reason}"))
    base = str((path.parent / named.base_path).absolute())
    return OvmsModel(named.name, base, _policy_of(named.model_version_policy))


def _is_neutral(field: str, value: Any) -> bool:
    """Whether a field asks for what happens anyway; shapes may be given for each input by its name."""
    values = list(value.values()) if field == "shape" and isinstance(value, dict) else [value]
    return all(one in _NEUTRAL.get(field, ()) for one in values)


def _policy_of(policy: _Policy | None) -> ModelPolicy | None:
    if policy is None:
        return None
    if policy.all is not None:
        return ModelPolicy("all")
    if policy.specific is not None:
        return ModelPolicy("specific", versions=tuple(policy.specific.versions))
    return ModelPolicy("latest", policy.latest.num_versions if policy.latest is not None else 1)
