"""Refuses JSON schemas whose `multipleOf` needs too much memory. Pure.

llguidance (1.9) makes a state of about 400 bytes for each remainder before its own limits apply. Where parts of a
schema apply to one value, it makes a state for each remainder of their least common multiple.
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
    is_joined = False
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
            is_joined = is_joined or _joins(keywords)
            rest.extend(keywords.values())
        elif isinstance(part, list):
            rest.extend(cast("list[Any]", part))
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
