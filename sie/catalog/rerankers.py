"""Reads `rerankers.toml` and operators' descriptions: models that rerank, with their authors' prompts and tokens."""

from __future__ import annotations

import math
import tomllib
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from sie.catalog.files import refuse
from sie.values.card import PairTemplate
from sie.values.errors import BadRequest


class Reranker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model reads a pair, and its score: an entry of the file, or `reranker` in a section of the file of models.

    The score of a causal model is (true token's logit - false token's logit) / divisor through the activation. The
    score of a classifier is its own logit / divisor through the activation; it does not use the tokens.
    """

    parts: tuple[str, ...]
    true_token: str = ""
    """Required for a causal model."""
    false_token: str = ""
    """Empty: nothing is subtracted."""
    activation: str = "Sigmoid"
    divisor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    layer: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The last layer to compute of a model that has a head behind each layer; None: all layers."""
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


def find_reranker(model_id: str, *, is_bare: bool = True) -> Reranker | None:
    """Return the entry for a model id, or None; is_bare tells whether the checkpoint has no `modules.json`."""
    lowered = model_id.lower()
    for entry in _entries():
        is_usable = is_bare or not entry.bare_only
        if is_usable and any(fnmatchcase(lowered, pattern.lower()) for pattern in entry.models):
            return entry.reranker
    return None


def fill_in_like(table: dict[str, Any]) -> dict[str, Any]:
    """Return a description with the values of the known model that its key `like` names; its own values come first.

    Raises BadRequest for a model that is not known.
    """
    if "like" not in table:
        return table
    known = find_reranker(str(table["like"]))
    if known is None:
        raise BadRequest(f"reranker like: {table['like']!r} is not the id of a known reranker")
    return {**msgspec.to_builtins(known), **{key: value for key, value in table.items() if key != "like"}}


def check_reranker(entry: Reranker) -> None:
    """Raise BadRequest for a description without exactly one place for the query and one for the document."""
    for place in ("{query}", "{document}"):
        if sum(part.count(place) for part in entry.parts) != 1:
            raise BadRequest(f"reranker parts: {place} must appear exactly once in all parts together")
    is_joined = any("{query}" in part and "{document}" in part for part in entry.parts)
    if entry.instructed_query is not None and (is_joined or entry.instructed_query.count("{query}") != 1):
        raise BadRequest(
            "reranker instructed_query: it must hold {query} once, and no part may hold both {query} and {document}"
        )
    if not math.isfinite(entry.divisor):
        raise BadRequest(f"reranker divisor: {entry.divisor} is not finite")


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


class _Entry(NamedTuple):
    """One entry of the file."""

    models: tuple[str, ...]
    bare_only: bool
    reranker: Reranker


@cache
def _entries() -> tuple[_Entry, ...]:
    text = files("sie.catalog").joinpath("rerankers.toml").read_text(encoding="utf-8")
    tables: list[dict[str, Any]] = tomllib.loads(text)["reranker"]
    return tuple(
        _Entry(tuple(table.pop("models")), table.pop("bare_only", False), msgspec.convert(table, Reranker))
        for table in tables
    )
