"""Chooses the spans to keep from a text's overlapping spans: the best first, as the library `gliner` does. Pure.

The library compares every span with all kept spans. A client's threshold and labels can make that thousands times
thousands. This module looks up each span by its ends, with the same result.
Source: gliner 0.2.29 decoding/decoder.py (greedy_search), decoding/utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_spans(spans: Sequence[tuple[int, int]], *, flat: bool, multi_label: bool) -> list[int]:
    """Return the numbers of the kept spans, in order; spans are (start, end), end exclusive, the best first.

    A span that overlaps a better one is dropped. Exceptions: one contains the other and flat is off, or both are equal
    and multi_label is on.
    """
    points = {point: place for place, point in enumerate(sorted({point for span in spans for point in span}))}
    seen: set[tuple[int, int]] = set()
    overlaps = _Flat(len(points)) if flat else _Nested(len(points))
    kept: list[int] = []
    for number, span in enumerate(spans):
        if span in seen:
            if multi_label:
                kept.append(number)
            continue
        if overlaps.try_take(points[span[0]], points[span[1]]):
            seen.add(span)
            kept.append(number)
    return kept


class _Flat:
    """A set of spans without overlaps."""

    def __init__(self, num_points: int) -> None:
        self._is_taken = bytearray(num_points)

    def try_take(self, start: int, end: int) -> bool:
        """Take a span unless part of it is already taken."""
        if self._is_taken.find(1, start, end) >= 0:
            return False
        self._is_taken[start:end] = b"\1" * (end - start)
        return True


class _Nested:
    """A set of spans that overlap only if one contains the other."""

    def __init__(self, num_points: int) -> None:
        self._first_start = list(range(num_points))
        """By end: the first start of a taken span that ends there."""
        self._last_end = list(range(num_points))
        """By start: the last end of a taken span that starts there."""

    def try_take(self, start: int, end: int) -> bool:
        """Take a span unless it partly overlaps a taken span, so that neither contains the other."""
        first = min(self._first_start[start + 1 : end], default=start)
        last = max(self._last_end[start + 1 : end], default=end)
        if first < start or last > end:
            return False
        self._first_start[end] = min(self._first_start[end], start)
        self._last_end[start] = max(self._last_end[start], end)
        return True
