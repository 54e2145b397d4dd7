"""Reads the models and adapters that the settings name, as far as that needs only local files."""

from __future__ import annotations

from sie.catalog.listing import check_adapters, check_models
from sie.catalog.lora import find_lora_weights, read_lora_config
from sie.catalog.spec import ModelSpec
from sie.config.settings import Loaded
from sie.supervisor.host_resources import StartError
from sie.supervisor.local_cards import read_local_card
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import SieError

Models = list[tuple[ModelSpec, bool, ModelCard | None]]
"""For each model its spec, whether it is loaded at the start, and its card if known."""


def read_models(loaded: Loaded) -> Models:
    """Return (spec, whether to load before readiness, card) of every model in the settings.

    The card is None for a model that must first be fetched or converted. Raises StartError for a model that can never
    be served.
    """
    models: Models = []
    for spec, start in check_models(loaded).values():
        try:
            card = read_local_card(spec, loaded.settings)
        except SieError as error:
            raise StartError(f"{'model' if start == 'preload' else 'lazy_model'}: {error.message}") from error
        models.append((spec, start == "preload", card))
    return models


def read_adapters(loaded: Loaded, models: Models) -> list[AdapterSpec]:
    """Return every adapter in the settings.

    Raises StartError for an adapter that can never be served because of its files or its model's kind.
    """
    adapters = check_adapters(loaded)
    cards = {spec.id: card for spec, _, card in models}
    for spec in adapters:
        card = cards.get(spec.model)
        if card is not None and card.kind not in ("encoder", "stub"):
            raise StartError(
                f"lora: Adapter '{spec.id}' cannot be loaded: model '{spec.model}' is not a text encoder ({card.kind}), "
                "and only text encoders run with adapters"
            )
        if spec.directory is None:
            continue
        try:
            read_lora_config(spec.id, spec.directory)
            find_lora_weights(spec.id, spec.directory)
        except SieError as error:
            raise StartError(f"lora: {error.message}") from error
    return adapters
