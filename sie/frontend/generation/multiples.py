"""Refuses JSON schemas whose `multipleOf` needs too much memory, or would leave out numbers. Pure.

llguidance (1.9) makes a state of about 400 bytes for each remainder before its own limits apply. Where parts of a
schema apply to one value, it makes a state for each remainder of their least common multiple.

It has a number written with the decimals of its `multipleOf` (1.50 for 0.25), or as a whole number. So every multiple
can be written, but an `enum` or `const` whose fractions have fewer decimals would lose them.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any, Final, cast

MAX_REMAINDERS: Final = 10_000
_REFUSAL: Final = (
    f"multipleOf is over {MAX_REMAINDERS} without its decimals (1.5 counts as 15), or so is the least common multiple "
    "in a schema that joins parts (allOf, patternProperties, or $ref, anyOf or oneOf beside other keywords)"
)
_INEXACT: Final = (
    "multipleOf {} is one of the fractions that binary numbers do not keep exactly when they are multiplied by 10; "
    "take another, such as 0.01 or 0.05"
)
_LOST: Final = (
    "multipleOf {} beside fractions in enum or const would leave out some of them; leave out multipleOf, "
    "because they are the only numbers anyway"
)
_JOINED: Final = frozenset({"$ref", "anyOf", "oneOf"})
"""Keywords whose schemas apply to the same value as the keywords beside them."""
_BESIDE: Final = _JOINED | {"multipleOf", "properties", "additionalProperties", "items", "prefixItems"}
_decoder: Final = json.JSONDecoder(strict=False)
"""Accepts all JSON that llguidance does."""


def refusal_of_schema(schema: object) -> str:
    """Return the reason to refuse a decoded JSON schema, or an empty text.

    Every `multipleOf` with a number counts, because a reference may lead to any place of a schema.
    """
    found: set[tuple[int, int]] = set()
    strict: float | None = None
    """A multiple whose fractions need all of its decimals."""
    is_joined = has_fractions = False
    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            keywords = cast("dict[str, Any]", part)
            multiple = keywords.get("multipleOf")
            if isinstance(multiple, (int, float)) and not isinstance(multiple, bool):
                if not abs(multiple) <= MAX_REMAINDERS:  # NaN, too
                    return _REFUSAL
                factor, places = _without_decimals(multiple)
                if factor > MAX_REMAINDERS:
                    return _INEXACT.format(multiple) if _has_few_digits(multiple) else _REFUSAL
                found.add((factor, places))
                if factor > 1 and places > 1:
                    strict = multiple
                    if _has_fractions(keywords):
                        return _LOST.format(multiple)
            has_fractions = has_fractions or _has_fractions(keywords)
            is_joined = is_joined or _joins(keywords)
            rest.extend(keywords.values())
        elif isinstance(part, list):
            rest.extend(cast("list[Any]", part))
    if is_joined and has_fractions and strict is not None:
        return _LOST.format(strict)
    return _REFUSAL if is_joined and _is_common_over(found) else ""


def refusal_of_json(text: str, start: int = 0) -> str:
    """Return the reason to refuse the JSON schema that begins at a place of a text, or an empty text."""
    while text[start : start + 1] in (" ", "\t", "\n", "\r"):
        start += 1
    try:
        schema, _ = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return "a schema is not valid JSON"
    return refusal_of_schema(schema)


def _joins(keywords: dict[str, Any]) -> bool:
    if "allOf" in keywords or "patternProperties" in keywords:
        return True
    return not _JOINED.isdisjoint(keywords) and sum(name in keywords for name in _BESIDE) > 1


def _has_fractions(keywords: dict[str, Any]) -> bool:
    listed = keywords.get("enum")
    values = [*(cast("list[Any]", listed) if isinstance(listed, list) else ()), keywords.get("const")]
    return any(isinstance(value, float) and not value.is_integer() for value in values)


def _without_decimals(multiple: float) -> tuple[int, int]:
    """Return (factor, places): the multiple is factor / 10**places. Rounds as llguidance does."""
    value, places = abs(float(multiple)), 0
    while value % 1:
        value *= 10
        places += 1
    return int(value), places


def _has_few_digits(multiple: float) -> bool:
    """Tell whether a multiple, as it is written, is within the limit."""
    return int("".join(map(str, Decimal(repr(multiple)).as_tuple().digits))) <= MAX_REMAINDERS


def _is_common_over(multiples: set[tuple[int, int]]) -> bool:
    """Tell whether the least common multiple is over the limit, counted in the smallest decimal place of any multiple."""
    most = max((places for _, places in multiples), default=0)
    common = 1
    for factor, places in multiples:
        common = math.lcm(common, max(1, factor) * 10 ** (most - places))
        if common > MAX_REMAINDERS:
            return True
    return False
