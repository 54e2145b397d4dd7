"""Reads the card of a model whose files are on this host, without a helper process."""

from __future__ import annotations

from sie.catalog.cards import make_card
from sie.catalog.generation import finish_generator
from sie.catalog.gguf_file import find_gguf
from sie.catalog.spec import ModelSpec
from sie.catalog.weights import with_num_weights
from sie.config.settings import Settings
from sie.values.card import ModelCard


def read_local_card(spec: ModelSpec, settings: Settings) -> ModelCard | None:
    """Return a model's card, or None if it must first be fetched or converted. Raises SieErrors."""
    if spec.stub is None and (spec.directory is None or settings.models.convert or find_gguf(spec.id, spec.directory)):
        return None
    card = make_card(spec, spec.directory or "")
    if card.generate is not None and card.tokenizer_file:
        card = finish_generator(card, settings.generation.chat_template)
    return with_num_weights(card) if card.stub is not None or card.tokenizer_file else None
