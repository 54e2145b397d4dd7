"""Reads the query of a list: its page. Shared by the APIs that list files, skills and their versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs

from sie.frontend.generation.sampling_fields import wrong

_MAX_DIGITS: Final = 6
Query = Mapping[str, Sequence[str]]


def parse_query(text: str) -> Query:
    """Return the fields of a query, each with its values."""
    return parse_qs(text, keep_blank_values=True)


def last_of(query: Query, field: str) -> str:
    """Return the last value of a field, or an empty text."""
    values = query.get(field)
    return values[-1] if values else ""


def read_limit(query: Query, default: int, highest: int) -> int:
    """Return the number of entries on a page. Raises BadRequest."""
    limit = last_of(query, "limit")
    if not limit:
        return default
    if not (limit.isascii() and limit.isdigit() and len(limit) <= _MAX_DIGITS and 1 <= int(limit) <= highest):
        raise wrong("limit", f"must be a whole number from 1 to {highest}")
    return int(limit)


def read_order(query: Query, default: str) -> bool:
    """Return whether the newest entry is first. Raises BadRequest."""
    order = last_of(query, "order") or default
    if order not in ("asc", "desc"):
        raise wrong("order", "must be 'asc' or 'desc'")
    return order == "desc"
