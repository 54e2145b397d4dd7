"""Builds the error for an unknown model, with similar ids. Must not search for similar ids of very long names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from sie.values.errors import NotFound

_MAX_SUGGEST_CHARS = 200


def model_not_found(model: str, known: Iterable[str]) -> NotFound:
    """Return the error for an unknown model id, with up to three similar ids.

    The wire has no full stop before the suggestion. Source: SIE API reference, section 2.
    """
    message = f"Model '{model}' not found"
    near = _near_ids(model, list(known)) if len(model) <= _MAX_SUGGEST_CHARS else []
    if near:
        message += f" Did you mean {', '.join(repr(id_) for id_ in near)}?"
    return NotFound(message)


def _near_ids(model: str, known: list[str]) -> list[str]:
    """Match on the full id first, then on the part after the last slash."""
    near = difflib.get_close_matches(model, known, n=3, cutoff=0.6)
    by_tail: dict[str, list[str]] = {}
    for id_ in known:
        by_tail.setdefault(id_.rpartition("/")[2], []).append(id_)
    for tail in difflib.get_close_matches(model.rpartition("/")[2], by_tail, n=3, cutoff=0.6):
        near += [id_ for id_ in by_tail[tail] if id_ not in near]
    return near[:3]
