"""Checks a client's Lark grammar. Refuses the constructs that may take hours to compile. Pure.

An intersection (`A & B`) or a complement (`~A`) of regular expressions may have more states than memory can hold.
llguidance (1.9) builds them before its own limits apply, and cannot be stopped there.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

import msgspec

_TOKEN: Final = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/')
"""A comment, a text or a regular expression."""
_OPERATOR: Final = re.compile(r"&|~(?!\s*\d)")
"""A tilde before a number is a repetition, not a complement."""
_REFUSAL: Final = "intersections (&) and complements (~) are not served: the time to compile them has no bound"
_OPEN: Final = "a text or a regular expression has no end"


def refusal_of(text: str) -> str:
    """Return the reason to refuse a grammar in Lark, or an empty text."""
    rest = _TOKEN.sub(" ", text)
    if _OPERATOR.search(rest):
        return _REFUSAL
    return _OPEN if '"' in rest or "/" in rest else ""  # an operator could hide behind an open string


def refusal_of_composed(text: str) -> str:
    """Return the reason to refuse a grammar in llguidance's own form: JSON that holds grammars, or Lark."""
    try:
        composed: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return refusal_of(text)
    grammars: Any = cast("dict[str, Any]", composed).get("grammars") if isinstance(composed, dict) else None
    for grammar in cast("list[Any]", grammars) if isinstance(grammars, list) else ():
        lark: Any = cast("dict[str, Any]", grammar).get("lark_grammar") if isinstance(grammar, dict) else None
        if isinstance(lark, str) and (found := refusal_of(lark)):
            return found
    return ""
