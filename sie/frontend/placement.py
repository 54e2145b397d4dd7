"""Decides which worker takes a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def choose_worker(outstanding: Iterable[tuple[int, int]]) -> int | None:
    """Return the slot with the fewest outstanding tokens, the lowest one of equals; None when there is none.

    outstanding: (slot, tokens submitted and not yet answered) of every worker that may take the request.
    """
    best: int | None = None
    fewest = 0
    for slot, tokens in outstanding:
        if best is None or tokens < fewest or (tokens == fewest and slot < best):
            best, fewest = slot, tokens
    return best
