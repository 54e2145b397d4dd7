"""Applies a checkpoint's settings that override its `tokenizer.json`, so that texts are read as transformers reads them.

Source: transformers 5.23 tokenization_utils_base.py, tokenization_utils_tokenizers.py and tokenization_bert.py;
transformers 4.57 tokenization_bert_fast.py; sentence_transformers 6.2 base/modules/transformer.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sie.catalog.added_tokens import AddedToken, missing_tokens
from sie.catalog.files import Checkpoint, open_checkpoint, refuse
from sie.catalog.tokenizer import keep_tokenizer
from sie.values.card import ModelCard, Side
from sie.values.extract import TextClassification, ZeroShot

_BERT_NAMES = ("Bert", "DistilBert", "Electra", "LayoutLM", "MPNet", "MobileBert", "SqueezeBert")
_BERT_CLASSES = {f"{name}Tokenizer{suffix}" for name in _BERT_NAMES for suffix in ("", "Fast")}
_BERT_TYPES = {"bert", "distilbert", "electra", "layoutlm", "mobilebert", "mpnet", "nomic_bert", "squeezebert"}
"""Values of `model_type` with such a tokenizer, where no file names its class."""
_LOWERCASE = {"type": "Lowercase"}
_CUT_AT_A_SIDE = (TextClassification, ZeroShot)
"""Extractors that cut a long text. The others read it in windows, or not through the tokenizer's own limit."""


class _Parts(msgspec.Struct):
    """The parts of a tokenizer.json that settings override; the vocabulary of several megabytes is skipped."""

    normalizer: dict[str, Any] | None = None
    truncation: dict[str, Any] | None = None
    added_tokens: list[AddedToken] = []


def with_tokenizer_settings(card: ModelCard, cache_dir: str) -> ModelCard:
    """Return a card whose tokenizer reads texts as the checkpoint's settings say, even if its own file disagrees.

    Writes a `tokenizer.json` to the cache if the card's own differs. Raises ModelLoadFailed, also for a model that has
    to lose the beginning of a long text, but whose input has parts that must stay.
    """
    try:
        data = Path(card.tokenizer_file).read_bytes()
        parts = msgspec.json.decode(data, type=_Parts)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return card  # the frontends refuse it
    checkpoint = open_checkpoint(card.id, card.directory)
    settings = {} if card.static_vectors else checkpoint.read_object("tokenizer_config.json")
    splits = card.generate is None and _flag(card.id, settings, "split_special_tokens", default=False)
    side = _truncation_side(card, settings, parts.truncation or {})
    if card.static_vectors is None:
        card = _with_file(card, cache_dir, data, _apply(card, checkpoint, settings, data, parts))
    return msgspec.structs.replace(card, truncation_side=side, splits_special_tokens=splits)


def _truncation_side(card: ModelCard, settings: dict[str, Any], truncation: dict[str, Any]) -> Side:
    """Return the side on which a long text loses tokens; 'right' for a model whose texts are never cut so."""
    name, side = "truncation_side in tokenizer_config.json", settings.get("truncation_side")
    if side is None:
        name, side = "direction of truncation in tokenizer.json", truncation.get("direction", "right")
    if card.generate is not None or not (card.extract is None or isinstance(card.extract, _CUT_AT_A_SIDE)):
        return "right"
    match str(side).lower():
        case "right":
            return "right"
        case "left" if not _has_fixed_parts(card):
            return "left"
        case _:
            raise refuse(card.id, f"its {name} is {side!r}; only 'right' can be run, which keeps a text's beginning")


def _has_fixed_parts(card: ModelCard) -> bool:
    """Tell whether a long input has parts that are not cut, or is read by two tokenizers."""
    is_filled = card.score is not None and (card.score.from_chat or card.score.template is not None)
    others = (card.late, card.listwise, card.static_queries, card.static_vectors)
    return is_filled or any(part is not None for part in others)


def _apply(card: ModelCard, checkpoint: Checkpoint, settings: dict[str, Any], data: bytes, parts: _Parts) -> bytes:
    """Return the bytes of a tokenizer.json with the settings; the same bytes if it has them already."""
    normalizer = _normalizer(card, parts.normalizer, settings, checkpoint.read_object("config.json"))
    if normalizer != parts.normalizer:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        data = msgspec.json.encode(raw | {"normalizer": msgspec.Raw(msgspec.json.encode(normalizer))})
    missing = missing_tokens(checkpoint, settings, parts.added_tokens)
    return _with_tokens(card, data, missing) if missing else data


def _with_file(card: ModelCard, cache_dir: str, before: bytes, data: bytes) -> ModelCard:
    """Return a card whose tokenizer.json has these bytes, and lowers texts itself if the card's model wants that."""
    if card.kind != "dual-encoder":  # their classes lower a text outside of the file
        card = msgspec.structs.replace(card, lowercase=False)
    if data == before:
        return card
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return msgspec.structs.replace(card, tokenizer_file=keep_tokenizer(card.id, cache_dir, digest, data.decode))


def _normalizer(
    card: ModelCard, form: dict[str, Any] | None, settings: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the normalizer that the settings ask for; form is that of the file."""
    letters = _letters(card.id, settings, config)
    if form is not None and form.get("type") == "BertNormalizer":
        form = form | letters
    if not card.lowercase or card.kind == "dual-encoder":
        return form
    steps = [form] if form is not None else []
    if form is not None and form.get("type") == "Sequence":
        steps = form["normalizers"]
    is_there = any(step.get("type") == "Lowercase" for step in steps)
    return form if is_there else {"type": "Sequence", "normalizers": [_LOWERCASE, *steps]}


def _letters(model_id: str, settings: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return the normalizer's fields that a tokenizer of BERT sets; empty for other tokenizers."""
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if str(name) not in _BERT_CLASSES if name else config.get("model_type") not in _BERT_TYPES:
        return {}
    accents = settings.get("strip_accents")
    return {
        "lowercase": _flag(model_id, settings, "do_lower_case", default=True),
        "strip_accents": accents if accents is None else _flag(model_id, settings, "strip_accents", default=False),
        "handle_chinese_chars": _flag(model_id, settings, "tokenize_chinese_chars", default=True),
    }


def _flag(model_id: str, settings: dict[str, Any], name: str, *, default: bool) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise refuse(model_id, f"tokenizer_config.json sets {name} to {value!r}")
    return value


def _with_tokens(card: ModelCard, data: bytes, missing: Sequence[AddedToken]) -> bytes:
    """Return a tokenizer.json that reads these tokens whole, except those that the model has no vector of."""
    import tokenizers  # the supervisor imports this module, and must not import that library

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        tokenizer.add_tokens([_library_token(token) for token in missing])
        known = [token for token in missing if (tokenizer.token_to_id(token.content) or 0) < card.vocab_size]
        if len(known) < len(missing):
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
            tokenizer.add_tokens([_library_token(token) for token in known])
    except Exception:  # the library raises bare Exception
        return data  # the frontends refuse it
    return tokenizer.to_str().encode() if known else data


def _library_token(token: AddedToken) -> Any:
    import tokenizers

    return tokenizers.AddedToken(
        token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
        normalized=token.is_normalized, special=token.special,
    )  # fmt: skip
