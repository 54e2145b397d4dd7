"""Reads `rerankers.toml`: causal language models that rerank, with their authors' prompts and tokens."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from sie.catalog.files import refuse
from sie.values.card import PairTemplate


class Reranker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file."""

    models: tuple[str, ...]
    true_token: str
    false_token: str
    activation: str
    max_tokens: int
    parts: tuple[str, ...]
    instructed_query: str | None = None
    """Replaces the part with the query for a request with an instruction, when the parts have no place for it."""
    default_instruction: str = ""

    @property
    def template(self) -> PairTemplate:
        """The template of a pair."""
        instructed = None
        if self.instructed_query is not None:
            instructed = tuple(self.instructed_query if "{query}" in part else part for part in self.parts)
        return PairTemplate(parts=self.parts, instructed_parts=instructed, default_instruction=self.default_instruction)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reranker: tuple[Reranker, ...]


def find_reranker(model_id: str) -> Reranker | None:
    """Return the entry for a model id, or None."""
    lowered = model_id.lower()
    for entry in _entries():
        if any(fnmatchcase(lowered, pattern.lower()) for pattern in entry.models):
            return entry
    return None


def token_id(model_id: str, tokenizer_file: Path, token: str) -> int:
    """Return a token's number in a `tokenizer.json`. Raises ModelLoadFailed when the token is missing."""
    import tokenizers  # the supervisor imports this module, and must not import that library

    try:
        number = tokenizers.Tokenizer.from_file(str(tokenizer_file)).token_to_id(token)
    except Exception as error:  # the library raises bare Exception
        raise refuse(model_id, f"tokenizer.json cannot be read: {error}") from error
    if number is None:
        raise refuse(model_id, f"its tokenizer has no token {token!r}, which its score is read from")
    return number


@cache
def _entries() -> tuple[Reranker, ...]:
    text = files("sie.catalog").joinpath("rerankers.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), _File).reranker
