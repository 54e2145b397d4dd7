"""Keeps the models and profiles that all hosts share, as a value: what a change adds, and which it conflicts with. Pure.

Profiles are only ever added. Every change has an epoch, which counts up. Source: SIE API reference, section 16.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sie.cluster.payloads import VERSION
from sie.values.errors import SieError
from sie.values.shared_config import ModelConfig, config_hash

_MAX_ANSWERS: Final = 256
_SCALARS: Final = ("hf_id", "hf_revision", "weights_path", "max_sequence_length", "pool")


class Change(msgspec.Struct, array_like=True, frozen=True):
    """The additions of one change. digest is that of the request's body: a repeated request has the same one."""

    digest: str
    model: str
    epoch: int
    created: list[str]


class Configs(msgspec.Struct, array_like=True, frozen=True):
    """The shared models by id, and the latest changes by their `Idempotency-Key`."""

    version: int = VERSION
    epoch: int = 0
    models: dict[str, ModelConfig] = {}
    changes: dict[str, Change] = {}

    def of_pool(self, pool: str) -> tuple[ModelConfig, ...]:
        """Return the configurations that the hosts of a queue pool take."""
        return tuple(config for config in self.models.values() if config.pool in (None, pool))

    def hash_of(self, pool: str) -> str:
        """Return the hash of those configurations."""
        return config_hash(self.of_pool(pool))


decoder: Final = msgspec.msgpack.Decoder(Configs)


def conflict(message: str) -> SieError:
    """Return the error for a change that contradicts the configurations in force."""
    return SieError(message, code="CONFIG_CONFLICT", http_status=409)


def add_config(known: Configs, config: ModelConfig, digest: str, key: str, epoch: int | None) -> Configs:
    """Return the configurations with one added; the last change of the result describes it.

    epoch is the one that the client has seen, or None. Raises SieError 409 where it has passed, where a profile or a
    field has another value already, and 422 where key was used for another body.
    """
    repeated = known.changes.get(key)
    if repeated is not None:
        if repeated.digest != digest:
            text = "Header 'Idempotency-Key' was used for another body"
            raise SieError(text, code="IDEMPOTENCY_KEY_REUSED", http_status=422)
        return known
    if epoch is not None and epoch != known.epoch:
        raise conflict(f"The configuration has epoch {known.epoch} now, not {epoch}: read it again")
    old = known.models.get(config.sie_id)
    merged, created = _merge(old, config)
    new_epoch = known.epoch + (merged != old)
    changes = dict(known.changes)
    if key:
        changes[key] = Change(digest, config.sie_id, new_epoch, created)
        for oldest in list(changes)[:-_MAX_ANSWERS]:
            del changes[oldest]
    return Configs(epoch=new_epoch, models={**known.models, config.sie_id: merged}, changes=changes)


def created_profiles(known: Configs, config: ModelConfig) -> list[str]:
    """Return the profiles of a configuration that are not there yet."""
    old = known.models.get(config.sie_id)
    return [name for name in config.profiles if old is None or name not in old.profiles]


def _merge(old: ModelConfig | None, new: ModelConfig) -> tuple[ModelConfig, list[str]]:
    if old is None:
        return new, list(new.profiles)
    given: dict[str, object] = {}
    for name in _SCALARS:
        was, wanted = getattr(old, name), getattr(new, name)
        if was is not None and wanted not in (None, was):
            raise conflict(f"Model '{old.sie_id}' has {name} {was!r} already; a configuration is only added to")
        given[name] = was if was is not None else wanted
    for name, profile in new.profiles.items():
        if old.profiles.get(name, profile) != profile:
            raise conflict(f"Model '{old.sie_id}' has another profile '{name}' already; profiles are only added")
    created = [name for name in new.profiles if name not in old.profiles]
    return msgspec.structs.replace(old, **given, profiles={**old.profiles, **new.profiles}), created
