"""Adds the models and profiles that a cluster shares to a host's own. What the host's operator wrote is never changed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sie.catalog.profiles import DEFAULT_PROFILE, config_profiles, known_profiles
from sie.catalog.spec import ModelSpec, check_model_id, check_revision
from sie.config.settings import Settings
from sie.runtime.logs import get_logger
from sie.supervisor.configured_models import Models
from sie.supervisor.local_cards import read_local_card
from sie.values.errors import BadRequest, SieError
from sie.values.shared_config import ModelConfig

_log = get_logger(__name__)


def add_configs(own: Models, configs: Sequence[ModelConfig], settings: Settings) -> tuple[Models, dict[str, str]]:
    """Return the models with those of a cluster, and the reason for each that is refused. Blocks: it reads files."""
    merged = {spec.id: (spec, preload, card) for spec, preload, card in own}
    refused: dict[str, str] = {}
    for config in configs:
        try:
            known = merged.get(config.sie_id)
            if known is not None:
                merged[config.sie_id] = (_with_profiles(known[0], config), *known[1:])
            elif config.hf_id is not None or config.weights_path is not None:
                spec = _new_spec(config, settings)
                merged[spec.id] = (spec, False, read_local_card(spec, settings))
        except SieError as error:
            refused[config.sie_id] = error.message
        except (
            Exception
        ) as error:  # strangers write both the configuration and the files: one model must not stop a host
            _log.exception("the configuration or the files of %s cannot be read", config.sie_id)
            refused[config.sie_id] = f"its configuration or its files cannot be read: {error or type(error).__name__}"
    return list(merged.values()), refused


def _with_profiles(spec: ModelSpec, config: ModelConfig) -> ModelSpec:
    for name, own, shared in (
        ("max_sequence_length", spec.max_sequence_length, config.max_sequence_length),
        ("hf_revision", spec.revision, config.hf_revision),
    ):
        if shared not in (None, own):
            raise BadRequest(f"this host has the model with another {name}")
    profiles = config_profiles(config, spec.profiles)
    if not profiles:
        return spec
    if taken := [name for name, options in spec.profiles.items() if profiles.get(name, options) != options]:
        raise BadRequest(f"this host has another profile '{taken[0]}' of the model")
    is_bare = not (spec.profiles or known_profiles(spec.id))
    offered = {DEFAULT_PROFILE: {}} if is_bare else spec.profiles  # else its own id would no longer be served
    return msgspec.structs.replace(spec, profiles={**offered, **profiles})


def _new_spec(config: ModelConfig, settings: Settings) -> ModelSpec:
    check_model_id(config.sie_id)
    if config.hf_revision is not None:
        check_revision(config.hf_revision)
    directory = _directory(config.weights_path, settings.cluster.weights_root) if config.weights_path else None
    return ModelSpec(
        id=config.sie_id, directory=directory, revision=config.hf_revision,
        max_sequence_length=config.max_sequence_length, default_encoder_weights=settings.models.encoder_weights,
        default_tensor_parallel=settings.generation.tensor_parallel, profiles=config_profiles(config),
    )  # fmt: skip


def _directory(path: str, root: str) -> str:
    """Return a path of the cluster's configuration as one of this host. Raises BadRequest outside of root."""
    if not root:
        raise BadRequest("this host has no weights_root, so it takes no weights_path")
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # too long, a null byte, links in a circle
        base = Path(root).resolve()
        found = (base / path).resolve()
        if found.is_relative_to(base) and found.is_dir():
            return str(found)
    raise BadRequest(f"there is no directory {path!r} below this host's weights_root")
