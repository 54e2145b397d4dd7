"""Answers two questions about text that comes in pieces: can its end still become a marker, and where does JSON end?
Pure.
"""

from __future__ import annotations

import re
from typing import Final

_ESCAPE: Final = re.compile(r"\\.", re.DOTALL)


def common_end(text: str, marker: str) -> int:
    """Return how many characters at the end of text may be the beginning of an incomplete marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def has_odd_quotes(json_text: str) -> bool:
    """Return whether the number of quotes is odd: then the piece begins or ends within a string, not both."""
    return _ESCAPE.sub("", json_text).count('"') % 2 == 1


class JsonScanner:
    """Finds the end of a JSON object or array in text that comes in pieces. Does not check its contents."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def scan(self, text: str) -> int | None:
        """Return the number of characters up to and including the end, or None if this piece does not contain it."""
        for position, char in enumerate(text):
            if self._in_string:
                self._read_in_string(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None

    def _read_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
