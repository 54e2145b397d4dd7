"""Reads profiles: named sets of options of a model. Each is offered as the model `id:profile`.

`profiles.toml` holds profiles of well-known checkpoints whose files lack their prompts. The operator's profiles are in
the file that `catalog` names (`sie.catalog.model_file`). Source: SIE API reference, sections 2, 11 and 18.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec

from sie.catalog.options import check_profile_options, gives_dense_by, read_muvera
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.shared_config import ModelConfig

DEFAULT_PROFILE: Final = "default"
"""The profile of requests without a profile; a model without it is offered only as `id:profile`."""
MAX_NAME_CHARS: Final = 64

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")

Options = dict[str, Any]
Profiles = dict[str, Options]
"""The options of each profile by name, with inheritance resolved."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile as written in a file. Its own options replace all options of the profile that it extends."""

    extends: str | None = None
    options: Options = {}


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `profiles.toml`."""

    models: tuple[str, ...]
    profiles: dict[str, Profile]


class _Matryoshka(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shorter vectors that models were trained for, where their files do not list them: any, or these."""

    models: tuple[str, ...]
    dimensions: bool | tuple[int, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[_Entry, ...]
    matryoshka: tuple[_Matryoshka, ...]


def model_of(entry_id: str) -> str:
    """Return the model's id of an entry: the part before the colon. Model ids never contain a colon."""
    return entry_id.partition(":")[0]


def fold_default(entry_id: str) -> str:
    """Return an entry's id without `:default`, because that entry is the model itself."""
    return entry_id.removesuffix(f":{DEFAULT_PROFILE}")


def known_profiles(model_id: str) -> Profiles:
    """Return the built-in profiles of a model, usually empty. The case of the id does not matter."""
    return _known().get(model_id.lower(), {})


def known_dimensions(model_id: str) -> bool | tuple[int, ...]:
    """Return the shorter dimensions that the authors of a model name outside of its files; usually none."""
    return _dimensions().get(model_id.lower(), False)


def flatten(profiles: Mapping[str, Profile], inherited: Profiles) -> Profiles:
    """Return each profile's options. inherited holds more profiles that `extends` may name.

    A profile takes all options of the profile that it extends, unless it has its own options. Raises BadRequest with
    the profile's name and the fault.
    """
    return {name: _own_options(name, profiles, inherited) for name in profiles}


def config_profiles(config: ModelConfig, inherited: Profiles | None = None) -> Profiles:
    """Return the options of each profile that a cluster shares. Raises BadRequest as `flatten` does."""
    written = {
        name: Profile(extends=profile.extends, options=profile.adapter_options.runtime)
        for name, profile in config.profiles.items()
    }
    return flatten(written, {**known_profiles(config.sie_id), **(inherited or {})})


def _own_options(name: str, profiles: Mapping[str, Profile], inherited: Profiles) -> Options:
    profile = profiles[name]
    try:
        if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARS:
            raise BadRequest(f"a name has 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' or '-'")
        check_profile_options(profile.options)
        if profile.extends is None:
            return dict(profile.options)
        parent = profiles.get(profile.extends)
        if parent is None and profile.extends not in inherited:
            raise BadRequest(f"it extends {profile.extends!r}, which is not a profile of this model")
        if parent is not None and parent.extends is not None:
            raise BadRequest(f"it extends {profile.extends!r}, which itself extends another profile")
    except BadRequest as error:
        raise BadRequest(f"profile {name!r}: {error.message}") from None
    return dict(profile.options or (parent.options if parent is not None else inherited[profile.extends]))


def entry_ids(model_id: str, profiles: Profiles) -> list[str]:
    """Return the ids under which a model is offered: its own, if it has a default profile, then `id:profile`."""
    if not profiles:
        return [model_id]
    return [model_id if name == DEFAULT_PROFILE else f"{model_id}:{name}" for name in _default_first(profiles)]


def entry_cards(card: ModelCard) -> list[ModelCard]:
    """Return one card for each entry of a model. That of `id:profile` has only this profile, named `default`."""
    if not card.profiles:
        return [card]
    ids = entry_ids(card.id, card.profiles)
    cards = [
        card if name == DEFAULT_PROFILE
        else msgspec.structs.replace(card, id=entry_id, profiles={DEFAULT_PROFILE: card.profiles[name]})
        for entry_id, name in zip(ids, _default_first(card.profiles), strict=True)
    ]  # fmt: skip
    return [_with_encoding(own) for own in cards]


def _with_encoding(card: ModelCard) -> ModelCard:
    """Return an entry's card with the dense output that its default profile computes from the multivector."""
    options = card.profiles.get(DEFAULT_PROFILE, {})
    muvera = read_muvera(options, "options")
    if muvera is None or not gives_dense_by(options, card.outputs):
        return card
    outputs = card.outputs if "dense" in card.outputs else ("dense", *card.outputs)
    dims = {**card.dims, "dense": muvera.width(card.dims["multivector"])}
    return msgspec.structs.replace(card, outputs=outputs, dims=dims)


def _default_first(profiles: Profiles) -> list[str]:
    return sorted(profiles, key=lambda name: name != DEFAULT_PROFILE)


@cache
def _file() -> _File:
    text = files("sie.catalog").joinpath("profiles.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File)


@cache
def _known() -> dict[str, Profiles]:
    return {model.lower(): flatten(entry.profiles, {}) for entry in _file().model for model in entry.models}


@cache
def _dimensions() -> dict[str, bool | tuple[int, ...]]:
    return {model.lower(): entry.dimensions for entry in _file().matryoshka for model in entry.models}
