"""Recognises generators that also read images, and describes their language model alone.

The language model computes the same for texts as the whole does, and is a class of transformers of its own. Its weights
are below another name; those of the other parts are not read. Source: transformers 5.23, the models of these types.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.values.card import ModelCard

PART: Final = "text_config"
"""The key of config.json with the language model's own configuration."""
_CLASSES: Final = {
    "gemma3": {"gemma3_text": "Gemma3ForCausalLM"},
    "gemma4": {"gemma4_text": "Gemma4ForCausalLM"},
    "mistral3": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "smolvlm": {"llama": "LlamaForCausalLM"},
}
"""The classes of language models, by the model_type of the whole and of its text_config."""
_WHOLE: Final = "ForConditionalGeneration"
_WEIGHT_NAMES: Final = (
    (r"^(?!(?:model\.)?(?:language_model|text_model)\.|lm_head\.)",),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?", "model."),
)
"""Rules as in `ModelCard.weight_names`; both layouts that transformers has written have these names."""


def text_part(config: dict[str, Any], *, is_bare: bool) -> dict[str, Any] | None:
    """Return the configuration of the language model within a generator that also reads images, or None for others.

    is_bare tells whether the checkpoint has no `modules.json`.
    """
    part = config.get(PART)
    architecture = str((config.get("architectures") or [""])[0])
    if not is_bare or not architecture.endswith(_WHOLE) or not isinstance(part, dict):
        return None
    name = _CLASSES.get(str(config.get("model_type")), {}).get(str(part.get("model_type")))
    return None if name is None else {**part, **_changes(config, part), "architectures": [name]}


def as_text_part(card: ModelCard, config: dict[str, Any]) -> ModelCard:
    """Return the card of a language model, with the place of its configuration and the names of its weights.

    config is that of the whole model.
    """
    changes = _changes(config, config[PART])
    return msgspec.structs.replace(card, config_part=PART, config_changes=changes, weight_names=_WEIGHT_NAMES)


def _changes(config: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the whole configuration that replace those of its language model."""
    tied = config.get("tie_word_embeddings", part.get("tie_word_embeddings"))
    return {} if tied is None else {"tie_word_embeddings": tied}
