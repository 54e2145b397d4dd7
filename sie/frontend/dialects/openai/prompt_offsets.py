"""Finds the position of each prompt token in the prompt's text. Pure.

A token is found by its bytes, as several may make one character. A tokenizer may have changed the text before it cut it, or
put something around it; then the places behind are near where they should be, and never outside the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def find_offsets(text: str, tokens: Sequence[bytes]) -> list[int]:
    """Return the number of characters before each token of a text; one that begins within a character has that one's."""
    raw = text.encode(errors="replace")
    is_first = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
    chars = [0, *np.cumsum(is_first).tolist()]
    """How many characters begin before each byte."""
    offsets: list[int] = []
    at = 0
    for number, token in enumerate(tokens):
        is_within = at < len(raw) and not is_first[at]
        offsets.append(chars[at] - is_within)
        at += _length_at(raw, at, token, is_edge=number in (0, len(tokens) - 1))
    return offsets


def _length_at(raw: bytes, at: int, token: bytes, *, is_edge: bool) -> int:
    """Return how many bytes of a text from `at` on are a token's."""
    if raw.startswith(token, at):
        return len(token)
    if token.startswith(b" ") and raw.startswith(token[1:], at):  # put before the first word by the tokenizer
        return len(token) - 1
    return 0 if is_edge else min(len(token), len(raw) - at)
