"""Reads a tokenizer's added tokens, which are separate from its vocabulary and include its special tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec


class AddedToken(msgspec.Struct):
    """One entry of `added_tokens` in tokenizer.json."""

    content: str
    id: int
    special: bool = False


class _Tokenizer(msgspec.Struct):
    """The part of tokenizer.json that is read here; the vocabulary of several megabytes is skipped."""

    added_tokens: list[AddedToken] = []


def read_added_tokens(tokenizer_file: str) -> list[AddedToken]:
    """Return the added tokens of a tokenizer.json. Raises OSError, and msgspec's errors for a malformed file."""
    return msgspec.json.decode(Path(tokenizer_file).read_bytes(), type=_Tokenizer).added_tokens
