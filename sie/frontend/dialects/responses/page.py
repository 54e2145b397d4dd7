"""Decodes the queries about a stored response: a page of its input items, or its stream's events after a number.

Source: the types of the openai client 3.52.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from sie.frontend.dialects.responses.items import Item
from sie.frontend.dialects.responses.reply import encode_page
from sie.frontend.generation.sampling_fields import wrong

_DEFAULT_LIMIT: Final = "20"
_MAX_LIMIT: Final = 100
_MAX_DIGITS: Final = 6
_MAX_NUMBER_DIGITS: Final = 12
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False, "": False}


def read_page(items: bytes, query: Mapping[str, Sequence[str]]) -> bytes:
    """Return the body with the items that a query asks for, newest first by default.

    items is JSON. For a field with several values, the last one counts. Raises BadRequest naming the field.
    """
    limit, order = _last(query, "limit") or _DEFAULT_LIMIT, _last(query, "order") or "desc"
    if not (limit.isascii() and limit.isdigit() and len(limit) <= _MAX_DIGITS and 1 <= int(limit) <= _MAX_LIMIT):
        raise wrong("limit", f"must be a whole number from 1 to {_MAX_LIMIT}")
    if order not in ("asc", "desc"):
        raise wrong("order", "must be 'asc' or 'desc'")
    found: list[Item] = msgspec.json.decode(items, type=list[dict[str, Any]])
    if order == "desc":
        found.reverse()
    if after := _last(query, "after"):
        number = next((number for number, item in enumerate(found) if item["id"] == after), None)
        if number is None:
            raise wrong("after", "is not the id of an item of this response")
        found = found[number + 1 :]
    shown = found[: int(limit)]
    return encode_page(shown, has_more=len(found) > len(shown))


def read_stream_query(query: Mapping[str, Sequence[str]]) -> int | None:
    """Return the number of the event after which the stream should start, -1 for all of it; None for no stream.

    Raises BadRequest naming the field.
    """
    wants_stream = _FLAGS.get(_last(query, "stream").lower())
    if wants_stream is None:
        raise wrong("stream", "must be 'true' or 'false'")
    after = _last(query, "starting_after")
    if not after:
        return -1 if wants_stream else None
    if not wants_stream:
        raise wrong("starting_after", "needs 'stream=true'")
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_NUMBER_DIGITS):
        raise wrong("starting_after", "must be the sequence_number of an event")
    return int(after)


def _last(query: Mapping[str, Sequence[str]], field: str) -> str:
    values = query.get(field)
    return values[-1] if values else ""
