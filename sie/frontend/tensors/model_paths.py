"""Splits the paths below `/v2/models/` and `/api/infer/`: the model, its version and the action. Pure.

A model's name may hold slashes, so it is the longest known name that the path begins with. A path whose version is not
decimal digits is not a route. Source: KServe v2 sheet, section 1.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final, NamedTuple

from sie.values.errors import BadRequest

_VERSION: Final = re.compile(r"(.+)/versions/([0-9]{1,19})")
_MAX_CHARS: Final = 1024
_MAX_VERSION: Final = (1 << 63) - 1


class ModelPath(NamedTuple):
    """A model, its version (empty: the newest) and the action (empty: its metadata)."""

    name: str
    version: str
    action: str


def split_model_path(tail: str, actions: Container[str], known: Container[str]) -> ModelPath | None:
    """Return the parts of `NAME[/versions/V][/ACTION]`, or None for another path; actions are the known ones."""
    head, slash, last = tail.rpartition("/")
    if last in actions and head in known and tail not in known:
        return ModelPath(head, "", last)  # the longest possible name
    readings = [ModelPath(tail, "", "")]
    if slash and head and last in actions:
        readings.append(ModelPath(head, "", last))
    for reading in list(readings):
        versioned = _VERSION.fullmatch(reading.name)
        if versioned is not None and int(versioned[2]) <= _MAX_VERSION:
            readings.append(ModelPath(versioned[1], versioned[2], reading.action))
    readings = [reading for reading in readings if reading.name and "/" not in (reading.name[0], reading.name[-1])]
    of_known = [reading for reading in readings if reading.name in known]
    if of_known:
        return max(of_known, key=lambda reading: len(reading.name))
    # Of an unknown model: take the shortest name, which leaves most for an action. A malformed version is not a route.
    found = min(readings, key=lambda reading: len(reading.name), default=None)
    return None if found is None or re.search(r"/versions(/|$)", found.name) else found


def split_version(tail: str, known: Container[str]) -> ModelPath | None:
    """Return the parts of `NAME[/V]` of the v1 API, or None if more follows a known name."""
    head, _, last = tail.rpartition("/")
    if tail in known or not head:
        return ModelPath(tail, "", "") if tail else None
    if head in known:
        return ModelPath(head, last, "") if is_version(last) else None
    if any(tail[: cut.start()] in known for cut in re.finditer("/", tail[:_MAX_CHARS])):
        return None
    return ModelPath(head, last, "") if is_version(last) else ModelPath(tail, "", "")


def check_version(version: str) -> None:
    """Raise BadRequest for a version that is neither empty nor a decimal number."""
    if version and not is_version(version):
        raise BadRequest(f"invalid model version '{version[:32]}': it must be a number")


def is_version(text: str) -> bool:
    """Return whether a text is a decimal number of any length, as versions of the v1 API are."""
    return text.isascii() and text.isdigit()
