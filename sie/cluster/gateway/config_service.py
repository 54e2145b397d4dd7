"""Serves `/v1/configs` of a gateway: the models and profiles that all hosts share. Source: SIE API reference, section 16."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import yaml

from sie.catalog.profiles import DEFAULT_PROFILE, config_profiles, fold_default, model_of
from sie.catalog.spec import check_model_id, check_revision
from sie.cluster.configs import Configs, add_config, created_profiles, decoder
from sie.cluster.connection import Connection
from sie.cluster.gateway.host_directory import Directory, Host
from sie.cluster.payloads import encode
from sie.cluster.shared_document import SharedDocument
from sie.frontend.remote import YAML, ClusterAnswer
from sie.runtime.strange_yaml import read_strange_yaml
from sie.values.errors import BadRequest, InputTooLong, NotFound, SieError
from sie.values.shared_config import ModelConfig, ResolveBody, as_json_has_it

_KEY: Final = "configs"
_MAX_BODY_BYTES: Final = 64 << 10
_MAX_DOCUMENT_BYTES: Final = 960 << 10
_MAX_KEY_CHARS: Final = 255
_MAX_NAME_BYTES: Final = 255
"""The longest name of a file or a directory. Source: NAME_MAX of Linux."""


class ConfigService:
    """The shared configuration as one gateway sees it."""

    def __init__(self, connection: Connection, directory: Directory, names: Callable[[], list[str]]) -> None:
        """Set up without connecting. `names` returns the ids of all models of the cluster, with their profiles."""
        self._directory = directory
        self._names = names
        self._document = SharedDocument(connection, _KEY, decoder, Configs(), lambda _: None)
        self.follow = self._document.follow
        self.read_soon = self._document.read_soon

    @property
    def epoch(self) -> int:
        """The epoch of the configuration that this gateway knows."""
        return self._document.value.epoch

    # --- changing -------------------------------------------------------------------------------------------------

    async def put(self, body: bytes, key: str, epoch: str) -> ClusterAnswer:
        """Add a model or profiles; key is the `Idempotency-Key`, epoch the `If-Match` of the client. Raises SieErrors."""
        if len(body) > _MAX_BODY_BYTES:
            raise InputTooLong(f"A configuration has at most {_MAX_BODY_BYTES} bytes", http_status=413)
        if len(key) > _MAX_KEY_CHARS:
            raise BadRequest(f"Header 'Idempotency-Key' has at most {_MAX_KEY_CHARS} characters")
        config = await asyncio.to_thread(read_config, body)
        digest, seen = hashlib.sha256(body).hexdigest(), _read_epoch(epoch)
        created: list[str] = []

        def edit(known: Configs) -> Configs:
            created[:] = created_profiles(known, config)
            changed = add_config(known, config, digest, key, seen)
            if len(encode(changed)) > _MAX_DOCUMENT_BYTES:
                raise InputTooLong("The configurations of all models together are too large", http_status=413)
            return changed

        configs = await self._document.change(edit)
        change = configs.changes.get(key)
        names, at = (change.created, change.epoch) if change is not None else (created, configs.epoch)
        return ClusterAnswer(201 if names else 200, {
            "model_id": config.sie_id, "epoch": at, "created_profiles": names,
            "existing_profiles": [name for name in config.profiles if name not in names],
        })  # fmt: skip

    # --- reading --------------------------------------------------------------------------------------------------

    def list(self) -> ClusterAnswer:
        """Describe every model that is configured or that a host has."""
        configs = self._document.value
        models = sorted({*configs.models, *map(model_of, self._names())})
        return ClusterAnswer(200, {"epoch": configs.epoch, "models": [self._summary(model) for model in models]})

    def _summary(self, model: str) -> dict[str, Any]:
        config = self._document.value.models.get(model)
        hosts = self._directory.offering(model, time.monotonic())
        return {
            "model_id": model, "profiles": self._profiles_of(model), "is_configured": config is not None,
            "bundles": sorted({host.lane.bundle for host in hosts}), "worker_count": len(hosts),
        }  # fmt: skip

    def _profiles_of(self, model: str) -> list[str]:
        shown = {name.partition(":")[2] or DEFAULT_PROFILE for name in self._names() if model_of(name) == model}
        config = self._document.value.models.get(model)
        return sorted({*shown, *(config.profiles if config is not None else ())})

    def show(self, model: str) -> ClusterAnswer:
        """Return a model's configuration as YAML. Raises NotFound."""
        return ClusterAnswer(200, _as_yaml(self._found(model)), YAML)

    def _found(self, model: str) -> ModelConfig:
        config = self._document.value.models.get(model)
        if config is None:
            raise NotFound(f"Model '{model}' has no configuration of the cluster", code="CONFIG_NOT_FOUND")
        return config

    def status(self, model: str) -> ClusterAnswer:
        """Return which hosts run a model's configuration. Raises NotFound."""
        config, configs = self._found(model), self._document.value
        hosts = [
            host for host in self._directory.live(time.monotonic()) if config.pool in (None, host.beat.pool)
        ]  # fmt: skip
        shown = [_acknowledged(host, model, configs.hash_of(host.beat.pool)) for host in hosts]
        return ClusterAnswer(200, {
            "model_id": model, "epoch": configs.epoch, "workers": shown, "worker_count": len(shown),
            "acked_workers": sum(one["acked"] for one in shown), "all_acked": all(one["acked"] for one in shown),
        })  # fmt: skip

    def list_bundles(self) -> ClusterAnswer:
        """Describe the bundles of the hosts."""
        names = sorted({host.lane.bundle for host in self._directory.live(time.monotonic())})
        return ClusterAnswer(200, {"bundles": [self._bundle(name) for name in names]})

    def show_bundle(self, name: str) -> ClusterAnswer:
        """Describe one bundle. Raises NotFound."""
        if all(host.lane.bundle != name for host in self._directory.live(time.monotonic())):
            raise NotFound(f"No host has bundle '{name}'", code="CONFIG_NOT_FOUND")
        return ClusterAnswer(200, self._bundle(name))

    def _bundle(self, name: str) -> dict[str, Any]:
        hosts = [host for host in self._directory.live(time.monotonic()) if host.lane.bundle == name]
        return {
            "bundle_id": name, "models": sorted({model for host in hosts for model in host.beat.models}),
            "worker_count": len(hosts), "bundle_config_hashes": sorted({host.beat.config_hash for host in hosts}),
        }  # fmt: skip

    def resolve(self, body: bytes) -> ClusterAnswer:
        """Return the model, profile and bundles behind a name. Raises NotFound, and SieError 409."""
        try:
            asked = msgspec.json.decode(body, type=ResolveBody).model
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"The body does not name a model: {error}") from None
        bundle, _, name = asked.rpartition(":/")
        model, _, profile = name.partition(":")
        profile = profile or DEFAULT_PROFILE
        if profile not in self._profiles_of(model):
            raise NotFound(f"Model '{name}' not found")
        hosts = self._directory.offering(fold_default(name), time.monotonic())
        bundles = sorted({host.lane.bundle for host in hosts})
        if bundle and bundle not in bundles:
            raise SieError(
                f"Model '{model}' is not in bundle '{bundle}'", code="DEPENDENCY_CONFLICT", http_status=409,
                extras={"compatible_bundles": bundles},
            )  # fmt: skip
        chosen = bundle or next(iter(bundles), None)
        return ClusterAnswer(200, {
            "model_id": model, "profile": profile, "bundle": chosen, "compatible_bundles": bundles,
        })  # fmt: skip

    def export(self) -> ClusterAnswer:
        """Return every configuration, as `put` takes them."""
        configs = self._document.value
        models = [_plain(config) for _, config in sorted(configs.models.items())]
        return ClusterAnswer(200, {"epoch": configs.epoch, "models": models})

    def show_epoch(self) -> ClusterAnswer:
        """Return the epoch, which every change increases."""
        return ClusterAnswer(200, {"epoch": self.epoch})


def _acknowledged(host: Host, model: str, wanted: str) -> dict[str, Any]:
    beat = host.beat
    error = beat.refused.get(model)
    return {
        "name": beat.name, "pool": beat.pool, "bundle": beat.bundle, "bundle_config_hash": beat.config_hash,
        "acked": beat.config_hash == wanted and error is None, "error": error,
    }  # fmt: skip


def read_config(body: bytes) -> ModelConfig:
    """Return the configuration that a body describes, in YAML or JSON. Blocks. Raises SieError 422."""
    try:
        config = _with_json_values(msgspec.convert(read_strange_yaml(body), ModelConfig))
        check_model_id(config.sie_id)
        if config.hf_id not in (None, config.sie_id):
            raise _invalid("'hf_id' differs from 'sie_id'; a model of the hub is served under its own id")
        if config.hf_id is not None and config.weights_path is not None:
            raise _invalid("it has both 'hf_id' and 'weights_path'")
        if config.weights_path is not None:
            _check_path(config.weights_path)
        if config.hf_revision is not None:
            check_revision(config.hf_revision)
        config_profiles(config, _unknown_parents(config))
    except (RecursionError, ValueError) as error:  # msgspec's, too
        raise _invalid(str(error)) from None
    except BadRequest as error:
        raise _invalid(error.message) from None
    return config


def _with_json_values(config: ModelConfig) -> ModelConfig:
    """Return a configuration that every host can read and hash: YAML has keys and values that JSON has not."""
    try:
        plain = as_json_has_it(config)
        encode(plain)  # JSON's integers have any length, those of the stored document 64 bits
    except (TypeError, OverflowError, ValueError) as error:
        raise _invalid(f"its keys must be texts, and its values those of JSON, with 64 bits: {error}") from None
    return plain


def _check_path(path: str) -> None:
    if not path.isprintable():
        raise _invalid("'weights_path' has control characters")
    if any(len(part.encode()) > _MAX_NAME_BYTES for part in path.split("/")):
        raise _invalid(f"'weights_path' has a name of more than {_MAX_NAME_BYTES} bytes")


def _unknown_parents(config: ModelConfig) -> dict[str, dict[str, Any]]:
    """Return the profiles that others extend and a host may have, as if they were there."""
    parents = {profile.extends for profile in config.profiles.values() if profile.extends is not None}
    return {name: {} for name in parents - config.profiles.keys()}


def _invalid(reason: str) -> SieError:
    return SieError(f"The configuration is not valid: {reason}", code="INVALID_CONFIG", http_status=422)


def _read_epoch(text: str) -> int | None:
    plain = text.strip().strip('"')
    if not plain or plain == "*":
        return None
    if not plain.isascii() or not plain.isdigit():
        raise BadRequest("Header 'If-Match' must be an epoch, a whole number")
    return int(plain[:18])


def _plain(config: ModelConfig) -> dict[str, Any]:
    """Return a configuration as plain values, without the fields that are not set."""
    return {name: value for name, value in msgspec.to_builtins(config).items() if value is not None}


def _as_yaml(config: ModelConfig) -> str:
    return yaml.safe_dump(_plain(config), sort_keys=False)
