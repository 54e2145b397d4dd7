"""Reads generation_config.json: defaults of requests, tokens that a model never chooses, and settings that are not served.

A checkpoint without that file may have the same settings in config.json, as older libraries wrote them.
Source: transformers 5.23 generation/configuration_utils.py, utils.py and logits_process.py.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.values.errors import ModelLoadFailed
from sie.values.generate import GenerateRule, TokenBans

_FILE: Final = "generation_config.json"
_OFF: Final[dict[str, float]] = {
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "guidance_scale": 1, "num_beams": 1, "typical_p": 1,
}  # fmt: skip
"""Numbers that turn a setting off. Null, false, 0 and what is empty turn off every setting."""
_UNSERVED: Final = (
    "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "sequence_bias",
    "exponential_decay_length_penalty", "guidance_scale", "forced_bos_token_id", "forced_eos_token_id", "num_beams",
    "penalty_alpha", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff", "watermarking_config", "stop_strings",
)  # fmt: skip
"""Settings that change an answer in the library, and that the engine does not compute."""


def read_settings(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of generation: those of the file, or of config.json in a checkpoint without it."""
    return config if checkpoint.find(_FILE) is None else checkpoint.read_object(_FILE)


def is_off(name: str, value: Any) -> bool:
    """Tell whether a setting with this value changes nothing."""
    return not value or value == _OFF.get(name)


def with_settings(rule: GenerateRule, model_id: str, settings: dict[str, Any], vocab_size: int) -> GenerateRule:
    """Return the rule with what the settings say. Raises ModelLoadFailed for a value that has no meaning.

    With `do_sample` false a request without a temperature gets the likeliest tokens, whatever the file's temperature is.
    """
    if (samples := settings.get("do_sample")) not in (None, True, False):
        raise _wrong(model_id, "do_sample", samples)
    temperature = _number(model_id, settings, "temperature", 0.0)
    return msgspec.structs.replace(
        rule,
        temperature=0.0 if samples is False else temperature,
        top_p=_number(model_id, settings, "top_p", 0.0),
        top_k=_whole(_number(model_id, settings, "top_k", 0.0)),
        min_p=_number(model_id, settings, "min_p", 0.0),
        repetition_penalty=_number(model_id, settings, "repetition_penalty", 1e-9),
        max_new_tokens=_whole(_number(model_id, settings, "max_new_tokens", 1.0)),
        bans=_bans(model_id, settings, vocab_size, rule.eos_token_ids),
        unserved_settings=tuple(name for name in _UNSERVED if not is_off(name, settings.get(name))),
    )


def _bans(model_id: str, settings: dict[str, Any], vocab_size: int, ends: tuple[int, ...]) -> TokenBans:
    def read(name: str, form: Any) -> Any:
        try:
            return msgspec.convert(settings.get(name) or (), form)
        except msgspec.ValidationError:
            raise _wrong(model_id, name, settings[name]) from None

    def known(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)

    words: tuple[tuple[int, ...], ...] = read("bad_words_ids", tuple[tuple[int, ...], ...])
    words = tuple(word for word in words if word and known(word) == word)
    single = tuple(word[0] for word in words if len(word) == 1 and word[0] not in ends)  # the library keeps the end
    return TokenBans(
        always=tuple(dict.fromkeys((*known(read("suppress_tokens", tuple[int, ...])), *single))),
        first=known(read("begin_suppress_tokens", tuple[int, ...])),
        sequences=tuple(word for word in words if len(word) > 1),
        ngram_size=_whole(_number(model_id, settings, "no_repeat_ngram_size", 0.0)) or 0,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _number(model_id: str, settings: dict[str, Any], name: str, least: float) -> float | None:
    value = settings.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise _wrong(model_id, name, value)
    return float(value)


def _wrong(model_id: str, name: str, value: Any) -> ModelLoadFailed:
    return refuse(model_id, f"among its settings of generation {name} is {value!r}")
