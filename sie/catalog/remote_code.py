"""Decides how to serve checkpoints with their own Python code (`auto_map`). Must never run that code.

A class of transformers replaces the code: the class for the checkpoint's `model_type`, or for another type. `remote_code.toml` lists
classes of well-known checkpoints, and how they differ from the library's classes: in values of the configuration, in
names of weights, or in layers, of which `sie.workers.loading.variants` has some. An encoder with unknown code is refused, because code may
change attention, pooling or tokens. `ignore_remote_code = true` in its section of the file of models allows it.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal

import msgspec

from sie.catalog.files import Checkpoint, open_checkpoint, refuse
from sie.catalog.generation import read_special_tokens
from sie.values.card import ModelCard
from sie.values.extract import Detection, ImageToText, TokenClassification

SETTING: Final = "ignore_remote_code"
_POOLINGS: Final = {"avg": "mean", "cls": "cls", "last": "lasttoken"}
"""Maps NVIDIA's values of `pooling` in config.json to our names."""


class _Code(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry for models: how these classes differ from the library's class for the same model_type."""

    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    where: dict[str, Any] = {}
    """Values of config.json that select this entry among those for the same classes."""
    expects: dict[str, Any] = {}
    """The only values of these keys of config.json that can be computed. A key may be missing."""
    part: str = ""
    """The key of config.json that has the transformer's configuration; values missing there are beside it."""
    served_as_type: str = ""
    """The library's model_type of the architecture, if it differs."""
    values: dict[str, Any] = {}
    """Values for the library's configuration, for keys that config.json lacks under these names."""
    names: dict[str, str] = {}
    """The library's names of keys of config.json."""
    rope: Literal["", "ntk", "dynamic"] = ""
    """The scaling of rotary positions that the library's class does not read from config.json."""
    weights: tuple[tuple[str, ...], ...] = ()
    layers: Literal["", "alibi", "experts", "latent"] = ""
    """Both as in `ModelCard`: `weight_names` and `layers`."""
    bidirectional: bool = False
    adds_eos: bool = False
    names_pooling: bool = False
    has_adapters: bool = False
    """Whether its weights have adapters, by the names in `lora_adaptations`."""
    skips_prompt: bool = False
    """Whether its vectors are the mean of the tokens behind the prompt."""


class _TokenizerCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry for tokenizers that work like the library's."""

    classes: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[_Code, ...]
    tokenizer: tuple[_TokenizerCode, ...]


def replace_remote_code(card: ModelCard, adapter: str | None = None) -> ModelCard:
    """Return the card with the changes that the checkpoint's code makes, for an encoder with or without a head.

    adapter is the operator's choice among the adapters in its weights, if the code has such.

    Raises ModelLoadFailed, naming the class, if it is unknown or cannot be replaced.
    """
    transformer = open_checkpoint(card.id, card.directory)
    config = transformer.read_object("config.json")
    settings = transformer.read_object("tokenizer_config.json")
    if tokenizer := _unknown_tokenizer(settings):
        raise _unknown(card.id, tokenizer, "tokenizer_config.json", "read texts as other tokens")
    reference = _model_class(config, _auto_class(card))
    if not reference or card.weight_names:  # open_clip's own configuration says what is computed
        return card
    code = _find(reference, config)
    if code is None:
        raise _unknown(card.id, reference, "config.json", "compute other values than transformers' own class")
    if code.skips_prompt:
        if card.pipeline[0].config["modes"] != ["mean"]:
            raise refuse(
                card.id, f"its code leaves the prompt out of the mean, but its modules do not; {_advice(reference)}"
            )
        card = msgspec.structs.replace(card, skips_prompt=True)
    if code.names_pooling:
        _check_pooling(card, config)
    changes = card.config_changes | _config_changes(card.id, reference, code, config)
    card = msgspec.structs.replace(
        card, config_part=code.part, config_changes=changes, weight_names=code.weights, layers=code.layers
    )
    if code.has_adapters and adapter is not None:
        card = _with_adapter(card, config, adapter)
    return _with_eos(card, transformer, code, settings)


def whole_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the values of its part, and those that this part may lack, for code that has such a part."""
    code = _find(_model_class(config, "AutoModel"), config)
    if code is None or not code.part:
        return config
    part = config.get(code.part)
    return {**code.values, **(part if isinstance(part, dict) else {}), **config}


def _auto_class(card: ModelCard) -> str:
    """Return the auto class that transformers would use to build the model."""
    if card.kind == "causal-reranker":
        return "AutoModelForCausalLM"
    if isinstance(card.extract, ImageToText):
        return "AutoModelForCausalLM"
    if isinstance(card.extract, Detection):
        return "AutoModelForZeroShotObjectDetection"
    if isinstance(card.extract, TokenClassification):
        return "AutoModelForTokenClassification"
    if card.extract is not None or card.kind == "cross-encoder":
        return "AutoModelForSequenceClassification"
    is_masked_lm = card.sparse is not None and card.sparse.kind == "splade"
    return "AutoModelForMaskedLM" if is_masked_lm else "AutoModel"


def _model_class(config: dict[str, Any], auto_class: str) -> str:
    """Return the model class in the checkpoint's code, or else its configuration class; empty for neither.

    Source: transformers 5.23 auto_factory.py: an auto class that `auto_map` does not name builds the library's class.
    """
    named = config.get("auto_map")
    if not isinstance(named, dict):
        return ""
    return _local(named.get(auto_class) or named.get("AutoConfig"))


def _unknown_tokenizer(settings: dict[str, Any]) -> str:
    """Return an unknown tokenizer class of the checkpoint's own code, or empty."""
    named = settings.get("auto_map")
    found = named.get("AutoTokenizer") if isinstance(named, dict) else named  # transformers 4 also wrote just the pair
    references = [_local(one) for one in (found if isinstance(found, list) else [found]) if one]
    known = {name for entry in _known().tokenizer for name in entry.classes}
    return next((reference for reference in references if reference not in known), "")


def _local(reference: Any) -> str:
    """Return a class reference without its repository."""
    return str(reference or "").rpartition("--")[2]


def _find(reference: str, config: dict[str, Any]) -> _Code | None:
    model_type = str(config.get("model_type"))
    return next(
        (
            code
            for code in _known().model
            if reference in code.classes
            and model_type in code.model_types
            and all(config.get(key) == value for key, value in code.where.items())
        ),
        None,
    )


def _config_changes(model_id: str, reference: str, code: _Code, config: dict[str, Any]) -> dict[str, Any]:
    """Return the values with which the library's class computes the same as the checkpoint's code."""
    for key, value in code.expects.items():
        if config.get(key, value) not in (value, None):
            reason = f"config.json sets {key} to {config[key]!r}; of {reference} only {value!r} is computed"
            raise refuse(model_id, reason)
    changes: dict[str, Any] = {"model_type": code.served_as_type} if code.served_as_type else {}
    own: Any = (config.get(code.part) or {}) if code.part else config
    changes |= {key: value for key, value in code.values.items() if key not in own}
    changes |= {name: config[key] for key, name in code.names.items() if config.get(key) is not None}
    if code.rope:
        changes |= _rope_changes(model_id, code.rope, {**config, **changes})
    if not code.bidirectional:
        return changes
    if config.get("is_causal") is True:
        reason = f"config.json sets is_causal, but {reference} sees both ways; newer revisions of such models say false"
        raise refuse(model_id, f"{reason}. Otherwise {_advice(reference)}")
    return {**changes, "is_causal": False}


def _rope_changes(model_id: str, kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the library's form of scaled rotary positions, or nothing for positions that are not scaled.

    "ntk" is fixed: 1 / (base * factor) ** (2i / d) / factor ** (2 / d), which is the library's linear scaling of
    another base. Source: text-embeddings-inference, backends/candle/src/models/gte.rs. "dynamic" is the library's, over
    the positions of the training. Source: the same, nomic.rs.
    """
    scaling = config.get("rope_scaling") or {}
    base = float(config.get("rope_theta") or 10_000.0)
    if kind == "dynamic":
        factor = config.get("rotary_scaling_factor")
        if not factor:
            return {}
        rope = {"rope_type": "dynamic", "rope_theta": base, "factor": float(factor)}
        return {"rope_parameters": rope, "max_position_embeddings": int(config.get("max_trained_positions") or 2048)}
    if not scaling:
        return {}
    if scaling.get("type", scaling.get("rope_type")) != "ntk" or scaling.get("mixed_b") is not None:
        raise refuse(
            model_id, f"rope_scaling in config.json is {scaling}; only a fixed ntk without mixed_b is computed"
        )
    factor, width = float(scaling["factor"]), int(config["hidden_size"]) // int(config["num_attention_heads"])
    rope = {"rope_type": "linear", "rope_theta": base * factor, "factor": factor ** (2 / width)}
    return {"rope_scaling": None, "rope_theta": None, "rope_parameters": rope}


def _check_pooling(card: ModelCard, config: dict[str, Any]) -> None:
    """Refuse a checkpoint whose config.json names another pooling than its card."""
    named = config.get("pooling", "avg")
    modes = card.pipeline[0].config["modes"] if card.pipeline else []
    if modes != [_POOLINGS.get(named)]:
        raise refuse(card.id, f"config.json pools by {named!r}, and its modules by {', '.join(modes) or 'nothing'}")


def _with_eos(card: ModelCard, transformer: Checkpoint, code: _Code, settings: dict[str, Any]) -> ModelCard:
    """Add the end of text that the code would add, unless the tokenizer's settings turn it off."""
    if not code.adds_eos or card.last_token or settings.get("add_eos_token") is False:
        return card
    token = read_special_tokens(settings, transformer.read_object("special_tokens_map.json")).get("eos_token")
    if token is None:
        raise refuse(card.id, "its code puts an eos_token behind every text, and tokenizer_config.json names none")
    return msgspec.structs.replace(card, last_token=token)


def _with_adapter(card: ModelCard, config: dict[str, Any], adapter: str) -> ModelCard:
    """Return the card with an adapter of the checkpoint's own, and with the prompt of the same name."""
    names, rank, alpha = config.get("lora_adaptations"), config.get("lora_rank"), config.get("lora_alpha")
    if not isinstance(names, list) or adapter not in names:
        raise refuse(card.id, f"its section sets adapter to {adapter!r}; it has {names}")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise refuse(card.id, f"config.json has lora_rank {rank!r} and lora_alpha {alpha!r}")
    prompt = card.prompts.get(adapter, card.default_prompt)
    return msgspec.structs.replace(card, merged_adapter=(names.index(adapter), alpha / rank), default_prompt=prompt)


def _unknown(model_id: str, reference: str, file: str, effect: str) -> Exception:
    reason = f"{file} names code of its own, {reference} (auto_map), which is never run and may {effect}"
    return refuse(model_id, f"{reason}; {_advice(reference)}")


def _advice(reference: str) -> str:
    return f"`{SETTING} = true` in the model's section of the file of models serves it without {reference}"


@cache
def _known() -> _File:
    text = files("sie.catalog").joinpath("remote_code.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File)
