"""Checks a client's Lark grammar. Refuses the constructs that may take hours to compile. Pure.

An intersection (`A & B`) or a complement (`~A`) of regular expressions may have more states than memory can hold.
llguidance (1.9) builds them before its own limits apply, and cannot be stopped there.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

import msgspec

from sie.frontend.generation.multiples import refusal_of_json, refusal_of_schema

_TOKEN: Final = re.compile(r'(?://|#)[^\n]*+|"(?:\\.|[^"\\\n])*+("?)|/(?:\\.|[^/\\])++(/?)|%json')
"""A comment, a text or a regular expression with its end as a group, or the sign before a JSON schema.

It never goes back over a text without an end: that would take hours, and `re` holds the interpreter lock.
"""
_OPERATOR: Final = re.compile(r"&|~(?!\s*\d)")
"""A tilde before a number is a repetition, not a complement."""
_REFUSAL: Final = "intersections (&) and complements (~) are not served: the time to compile them has no bound"
_OPEN: Final = "a text or a regular expression has no end"


def refusal_of(text: str) -> str:
    """Return the reason to refuse a grammar in Lark, or an empty text."""
    for token in _TOKEN.finditer(text):
        if "" in token.groups():  # an operator could hide behind an open string
            return _OPEN
        if token[0] == "%json" and (found := refusal_of_json(text, token.end())):
            return found
    rest = _TOKEN.sub(" ", text)
    if _OPERATOR.search(rest):
        return _REFUSAL
    return _OPEN if "/" in rest else ""


def refusal_of_composed(text: str) -> str:
    """Return the reason to refuse a grammar in llguidance's own form: JSON that holds grammars, or Lark."""
    try:
        composed: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return "it is not valid JSON" if text.lstrip().startswith("{") else refusal_of(text)
    if not isinstance(composed, dict):
        return refusal_of(text)
    grammars: Any = cast("dict[str, Any]", composed).get("grammars")
    for grammar in cast("list[Any]", grammars) if isinstance(grammars, list) else ():
        if isinstance(grammar, dict) and (found := _refusal_of_part(cast("dict[str, Any]", grammar))):
            return found
    return ""


def _refusal_of_part(grammar: dict[str, Any]) -> str:
    lark = grammar.get("lark_grammar")
    found = refusal_of(lark) if isinstance(lark, str) else ""
    return found or refusal_of_schema(grammar.get("json_schema"))
