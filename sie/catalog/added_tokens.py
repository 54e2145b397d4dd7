"""Reads a tokenizer's added tokens, which stand beside its vocabulary. Special tokens are among them."""

from __future__ import annotations

from pathlib import Path

import msgspec


class AddedToken(msgspec.Struct):
    """One of `added_tokens` in tokenizer.json."""

    content: str
    id: int
    special: bool = False


class _Tokenizer(msgspec.Struct):
    """What is read of tokenizer.json here; the vocabulary, of megabytes, is passed over."""

    added_tokens: list[AddedToken] = []


def read_added_tokens(tokenizer_file: str) -> list[AddedToken]:
    """Return the added tokens of a tokenizer.json. Raises OSError, and what msgspec raises for a file that is no such one."""
    return msgspec.json.decode(Path(tokenizer_file).read_bytes(), type=_Tokenizer).added_tokens
