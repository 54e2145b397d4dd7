"""Chooses which of a text's overlapping spans stay: the best first, as the library `gliner` does. Pure.

The library compares every span with all that stay, which a client's threshold and labels make thousands times
thousands. Here each span is looked up by its ends, and the answer is the same.
Source: gliner 0.2.29 decoding/decoder.py (greedy_search), decoding/utils.py.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_spans(spans: Sequence[tuple[int, int]], *, flat: bool, multi_label: bool) -> list[int]:
    """Return the numbers of the spans that stay, in order; spans are (start, end), end exclusive, the best first.

    One that overlaps a better one goes, unless one of the two holds the other and flat is off, or both are the same
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
    """Spans of which no two overlap."""

    def __init__(self, num_points: int) -> None:
        self._is_taken = bytearray(num_points)

    def try_take(self, start: int, end: int) -> bool:
        """Take a span unless a part of it is taken."""
        if self._is_taken.find(1, start, end) >= 0:
            return False
        self._is_taken[start:end] = b"\1" * (end - start)
        return True


class _Nested:
    """Spans of which no two overlap but where one holds the other."""

    def __init__(self, num_points: int) -> None:
        self._first_start = list(range(num_points))
        """By end: the first start of a taken span that ends there."""
        self._last_end = list(range(num_points))
        """By start: the last end of a taken span that starts there."""

    def try_take(self, start: int, end: int) -> bool:
        """Take a span unless one that was taken begins outside it and ends inside, or the other way round."""
        first = min(self._first_start[start + 1 : end], default=start)
        last = max(self._last_end[start + 1 : end], default=end)
        if first < start or last > end:
            return False
        self._first_start[end] = min(self._first_start[end], start)
        self._last_end[start] = max(self._last_end[start], end)
        return True
