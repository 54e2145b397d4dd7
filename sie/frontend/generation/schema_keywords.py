"""Rewrites JSON schemas in the keywords that llguidance (1.9) knows, where that changes nothing that they bind. Pure.

It refuses formats that it does not know and `propertyNames`, which the schemas of ordinary types have: pydantic writes
`path`, `binary` and `password`, and zod writes `propertyNames` for every record. Source: JSON Schema 2020-12, core,
section 10.3.2.4, and validation, section 7, where an unknown format is a note.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

DATA: Final = frozenset({"const", "default", "enum", "example", "examples"})
"""Keywords whose values are not schemas."""
NAMED: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords whose values map names to schemas."""
_FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
_ANY_NAME: Final[tuple[Any, ...]] = (True, {}, {"type": "string"})


def with_known_keywords(schema: str) -> str:
    """Return the JSON of a schema, rewritten if it has to be."""
    try:
        decoded: Any = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError):  # llguidance may read it, and has the words for what is wrong
        return schema
    return msgspec.json.encode(decoded).decode() if _rewrite(decoded) else schema


def _rewrite(schema: Any) -> bool:
    """Rewrite a decoded schema in place, and return whether it changed."""
    has_changed = False
    rest = [(schema, False)]  # each with whether its keys are the client's names, not keywords
    while rest:
        part, has_names = rest.pop()
        if isinstance(part, list):
            rest += [(one, False) for one in cast("list[Any]", part)]
        if not isinstance(part, dict):
            continue
        keywords = cast("dict[str, Any]", part)
        if not has_names:
            has_changed |= _drop_note(keywords) | _list_names(keywords)
        rest += [(one, not has_names and key in NAMED) for key, one in keywords.items() if has_names or key not in DATA]
    return has_changed


def _drop_note(keywords: dict[str, Any]) -> bool:
    is_note = isinstance(form := keywords.get("format"), str) and form not in _FORMATS
    if is_note:
        del keywords["format"]
    return is_note


def _list_names(keywords: dict[str, Any]) -> bool:
    """Replace `propertyNames` by the properties that it allows; return whether it could be."""
    names = keywords.get("propertyNames")
    if names in _ANY_NAME:
        del keywords["propertyNames"]
        return True
    listed = cast("dict[str, Any]", names).get("enum") if isinstance(names, dict) else None
    own, other = keywords.get("properties", {}), keywords.get("additionalProperties", True)
    is_plain = isinstance(names, dict) and names.keys() <= {"type", "enum"} and "patternProperties" not in keywords
    if not (is_plain and isinstance(listed, list) and isinstance(own, dict)):
        return False
    allowed = [name for name in cast("list[Any]", listed) if isinstance(name, str)]
    own = cast("dict[str, Any]", own)
    keywords["properties"] = {name: own.get(name, other) for name in allowed if name in own or other is not False}
    keywords["additionalProperties"] = False
    del keywords["propertyNames"]
    return True
