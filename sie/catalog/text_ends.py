"""Finds the tokens that a tokenizer's configuration adds around every text but its `tokenizer.json` does not.

transformers up to 4 wrote `add_bos_token` and `add_eos_token` of tokenizer_config.json into the post-processor. Most
such models were published with it. transformers 5 uses the post-processor of tokenizer.json unchanged. Source:
transformers 4.57 tokenization_llama_fast.py (`update_post_processor`); embeddings-benchmark/mteb, pull request 5237.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.generation import read_special_tokens
from sie.catalog.tokenizer import keep_tokenizer
from sie.values.card import ModelCard

END_KEYS: Final = frozenset({"add_bos_token", "add_eos_token"})
_SAMPLE: Final = "a"


class TextEnds(NamedTuple):
    """The token before and the token after every text, each empty if the configuration has none."""

    first: str = ""
    last: str = ""


class _Mark(NamedTuple):
    """A token that the post-processor does not add."""

    token: str
    token_id: int


def read_text_ends(transformer: Checkpoint, overrides: dict[str, Any]) -> TextEnds:
    """Return the tokens that a tokenizer's configuration adds around every text.

    overrides are the settings that sentence-transformers gives the tokenizer. Raises ModelLoadFailed when it adds an
    end of text but does not name the token.
    """
    settings = {**transformer.read_object("tokenizer_config.json"), **overrides}
    tokens = read_special_tokens(settings, transformer.read_object("special_tokens_map.json"))
    first = tokens.get("bos_token", "") if settings.get("add_bos_token") is True else ""
    if settings.get("add_eos_token") is not True:
        return TextEnds(first=first)
    if "eos_token" not in tokens:
        raise refuse(transformer.id, "tokenizer_config.json sets add_eos_token, but names no eos_token")
    return TextEnds(first=first, last=tokens["eos_token"])


def with_text_ends(card: ModelCard, cache_dir: str) -> ModelCard:
    """Return a card whose tokenizer adds the card's first and last token to every text, and counts them in limits.

    Writes a `tokenizer.json` to the cache if the card's own does not add them. Raises ModelLoadFailed.
    """
    if not (card.first_token or card.last_token):
        return card
    try:
        data = Path(card.tokenizer_file).read_bytes()
    except OSError as error:
        raise refuse(card.id, f"tokenizer.json: {error.strerror}", "STORAGE") from error
    first, last = _missing_marks(card, data)
    if first is None and last is None:
        return card
    from importlib.metadata import version  # imports a mail parser

    digest = hashlib.blake2b(version("tokenizers").encode(), digest_size=16)
    digest.update(b"\0%s\0%s\0" % (card.first_token.encode(), card.last_token.encode()))
    digest.update(data)
    path = keep_tokenizer(card.id, cache_dir, digest.hexdigest(), lambda: _rewrite(card.id, data, first, last))
    return msgspec.structs.replace(card, tokenizer_file=path)


def _missing_marks(card: ModelCard, data: bytes) -> tuple[_Mark | None, _Mark | None]:
    ids, tokenizer = _encode_sample(card.id, data)
    marks: list[_Mark | None] = []
    for token, index in ((card.first_token, 0), (card.last_token, -1)):
        token_id = tokenizer.token_to_id(token) if token else None
        if token and token_id is None:
            raise refuse(card.id, f"its tokenizer has no token {token!r}, which is wanted at an end of every text")
        is_there = token_id is None or (bool(ids) and ids[index] == token_id)
        marks.append(None if is_there or token_id is None else _Mark(token, token_id))
    return marks[0], marks[1]


def _rewrite(model_id: str, data: bytes, first: _Mark | None, last: _Mark | None) -> str:
    """Return the text of a tokenizer.json whose post-processor also adds the marks."""
    parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    processor = msgspec.json.decode(parts.get("post_processor", msgspec.Raw(b"null")))
    parts["post_processor"] = msgspec.Raw(msgspec.json.encode(_with_marks(processor, first, last)))
    text = msgspec.json.encode(parts)
    before, after = _encode_sample(model_id, data)[0], _encode_sample(model_id, text)[0]
    if after != [*_ids(first), *before, *_ids(last)]:
        raise refuse(model_id, "its tokenizer.json has a post-processor that no token can be added to")
    return text.decode()


def _encode_sample(model_id: str, data: bytes) -> tuple[list[int], Any]:
    import tokenizers  # the supervisor imports this module, and must not import that library

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer.encode(_SAMPLE).ids, tokenizer
    except Exception as error:  # the library raises bare Exception
        raise refuse(model_id, f"tokenizer.json cannot be read: {error}") from error


def _with_marks(processor: dict[str, Any] | None, first: _Mark | None, last: _Mark | None) -> dict[str, Any]:
    """Return a post-processor, in the form of tokenizer.json, that also adds the marks."""
    if processor is None:
        return _with_marks(_plain_template(), first, last)
    if processor["type"] == "TemplateProcessing":
        added = {mark.token: _special(mark) for mark in (first, last) if mark is not None}
        return {
            **processor,
            "single": _marked(processor["single"], first, last),
            "pair": _marked(processor["pair"], first, last),
            "special_tokens": {**processor["special_tokens"], **added},
        }
    steps: list[dict[str, Any]] = processor["processors"] if processor["type"] == "Sequence" else [processor]
    for index, step in enumerate(steps):
        if step["type"] == "TemplateProcessing":
            changed = [*steps[:index], _with_marks(step, first, last), *steps[index + 1 :]]
            return {"type": "Sequence", "processors": changed}
    return {"type": "Sequence", "processors": [*steps, _with_marks(None, first, last)]}


def _marked(pieces: list[dict[str, Any]], first: _Mark | None, last: _Mark | None) -> list[dict[str, Any]]:
    """Return a template's pieces with the marks at both ends, and between the texts of a pair."""
    starts = [index for index, piece in enumerate(pieces) if "Sequence" in piece]
    marked: list[dict[str, Any]] = []
    for index, start in enumerate(starts):
        begin = 0 if index == 0 else starts[index - 1] + 1
        end = len(pieces) if start == starts[-1] else start + 1
        type_id = pieces[start]["Sequence"]["type_id"]
        marked += [*_pieces(first, type_id), *pieces[begin:end], *_pieces(last, type_id)]
    return marked


def _pieces(mark: _Mark | None, type_id: int) -> list[dict[str, Any]]:
    return [] if mark is None else [{"SpecialToken": {"id": mark.token, "type_id": type_id}}]


def _plain_template() -> dict[str, Any]:
    texts = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": texts[:1], "pair": texts, "special_tokens": {}}


def _special(mark: _Mark) -> dict[str, Any]:
    return {"id": mark.token, "ids": [mark.token_id], "tokens": [mark.token]}


def _ids(mark: _Mark | None) -> list[int]:
    return [] if mark is None else [mark.token_id]
