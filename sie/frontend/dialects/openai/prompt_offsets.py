"""Finds the position of each prompt token in the prompt's text. Pure.

A token is found by its bytes, because several tokens may form one character. A tokenizer may have changed the text before
it split it, or added tokens around it. Then later offsets are approximate, but never outside the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def find_offsets(text: str, tokens: Sequence[bytes]) -> list[int]:
    """Return each token's offset in a text, in characters. A token that begins within a character gets its offset."""
    raw = text.encode(errors="replace")
    is_first = (np.frombuffer(raw, np.uint8) & 0xC0) != 0x80
    chars = [0, *np.cumsum(is_first).tolist()]
    """The number of characters that begin before each byte."""
    offsets: list[int] = []
    at = 0
    for number, token in enumerate(tokens):
        is_within = at < len(raw) and not is_first[at]
        offsets.append(chars[at] - is_within)
        at += _length_at(raw, at, token, is_edge=number in (0, len(tokens) - 1))
    return offsets


def _length_at(raw: bytes, at: int, token: bytes, *, is_edge: bool) -> int:
    """Return the number of bytes of the text from `at` that belong to a token."""
    if raw.startswith(token, at):
        return len(token)
    if token.startswith(b" ") and raw.startswith(token[1:], at):  # the tokenizer added the space before the first word
        return len(token) - 1
    return 0 if is_edge else min(len(token), len(raw) - at)
