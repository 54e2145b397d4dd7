"""Defines the configuration of one model that all hosts of a cluster share. Source: SIE API reference, sections 16 and 18."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(min_length=1, max_length=500)]
_to_json: Final = msgspec.json.Encoder(order="sorted").encode


class AdapterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a profile. `loadtime` has no equivalent: what it says is read from the checkpoint."""

    runtime: dict[str, Any] = {}


class ProfileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One profile. Its own options replace all options of the profile that it extends."""

    extends: Text | None = None
    adapter_options: AdapterSettings = AdapterSettings()


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model: where its weights are, for hosts that do not have it, and its profiles.

    Without hf_id and weights_path it only adds profiles to a model that a host has.
    """

    sie_id: Text
    hf_id: Text | None = None
    hf_revision: Text | None = None
    weights_path: Text | None = None
    max_sequence_length: Annotated[int, Meta(ge=1)] | None = None
    pool: Text | None = None
    """The queue pool whose hosts take it; None means all."""
    profiles: Annotated[dict[Text, ProfileConfig], Meta(max_length=256)] = {}


class ResolveBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/configs/resolve`: a model as a request names it, `[bundle:/]org/model[:profile]`."""

    model: Text


def as_json_has_it(config: ModelConfig) -> ModelConfig:
    """Return a configuration with JSON's values alone: a date becomes a text, and not-a-number null.

    Raises TypeError, OverflowError or ValueError for keys and values that JSON, and so `config_hash`, cannot hold.
    """
    return msgspec.json.decode(_to_json(config), type=ModelConfig)


def config_hash(configs: Iterable[ModelConfig]) -> str:
    """Return the hash by which hosts say which configuration they run; empty for none.

    Source: SIE API reference, section 16. Keys of a profile that have no equivalent here are null.
    """
    listed = [
        {
            "sie_id": config.sie_id, "revision": config.hf_revision,
            "profiles": [
                {"name": name, "config": _hashed(config.profiles[name])} for name in sorted(config.profiles)
            ],
        }
        for config in sorted(configs, key=lambda config: config.sie_id)
    ]  # fmt: skip
    return hashlib.sha256(_to_json(listed)).hexdigest() if listed else ""


def _hashed(profile: ProfileConfig) -> dict[str, Any]:
    options = {"loadtime": {}, "runtime": profile.adapter_options.runtime, "extends": profile.extends}
    return {"adapter_path": None, "max_batch_tokens": None, "compute_precision": None, "adapter_options": options}
