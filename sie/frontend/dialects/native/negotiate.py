"""Chooses between msgpack and JSON. Source: SIE API reference, section 3."""

from __future__ import annotations

MSGPACK = "application/msgpack"
JSON = "application/json"

_MSGPACK_NAMES = (MSGPACK, "application/x-msgpack")
# The values that real clients send, answered without a search. It is not a cache, so a client cannot make it grow.
_CONTENT_TYPES: dict[str | None, bool] = {
    None: False,
    "": False,
    MSGPACK: True,
    "application/x-msgpack": True,
    JSON: False,
    "application/json; charset=utf-8": False,
}
_ACCEPTS: dict[str | None, bool] = {
    None: True,
    "": True,
    MSGPACK: True,
    "application/x-msgpack": True,
    "*/*": True,
    JSON: False,
}


def is_msgpack(content_type: str | None) -> bool:
    """Tell whether a request body is msgpack. Any other body is read as JSON, also without the header."""
    known = _CONTENT_TYPES.get(content_type)
    if known is None:
        return _names_msgpack(str(content_type).lower())
    return known


def wants_msgpack(accept: str | None) -> bool:
    """Tell whether a success body is msgpack. Errors are always JSON.

    Substring tests, in this order: nothing -> msgpack; a msgpack type anywhere -> msgpack; `application/json` -> JSON;
    anything else (`*/*`, `text/html`) -> msgpack. q-values are ignored.
    """
    known = _ACCEPTS.get(accept)
    if known is None:
        lowered = str(accept).lower()
        return _names_msgpack(lowered) or JSON not in lowered
    return known


def content_type(msgpack: bool) -> str:
    """Return the content type of a success body."""
    return MSGPACK if msgpack else JSON


def _names_msgpack(lowered: str) -> bool:
    return any(name in lowered for name in _MSGPACK_NAMES)
