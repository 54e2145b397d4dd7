"""Finds the end of an answer: the first of the request's stop strings, which may span tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on up to a stop string. Holds back only text that may be the beginning of one.

    The stop string whose last character comes first ends the answer; if several end there, the longest does. So the
    result does not depend on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None
        """The stop string that was found. No text is passed on after it."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Return the text, not returned yet, that certainly belongs to the answer.

        may_end: whether a stop string may have its last character in this text.
        """
        if not self._stops:
            return text
        if self.found is not None:
            return ""
        held = self._held + text
        match = self._first(held, len(self._held)) if may_end else None
        if match is not None:
            start, self.found = match
            self._held = ""
            return held[:start]
        keep = self._num_open(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """Return the text held back, after the last text."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, num_old: int) -> tuple[int, str] | None:
        """Return the start of the stop string that ends first behind the first num_old characters, and the string."""
        ends = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop, max(0, num_old + 1 - len(stop)))) >= 0
        ]
        return min(ends)[1:] if ends else None

    def _num_open(self, text: str) -> int:
        """Return the largest number of last characters that are the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - size :]
            if any(len(stop) > size and stop.startswith(tail) for stop in self._stops):
                return size
        return 0
