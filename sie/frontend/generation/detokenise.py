"""Owns the text of tokens that come one by one. Pure.

Whatever the pieces in which tokens come, the texts joined are that of all of them decoded at once, and no piece ends within
a character.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Sequence
from typing import Final, Protocol

_MAX_BEFORE: Final = 16


class TokenDecoder(Protocol):
    """The text of one answer. Ids come in order, each once."""

    def push(self, token_id: int) -> str:
        """Return the text that is certain now and was not before."""
        ...

    def flush(self) -> str:
        """Return what is left when no token follows."""
        ...


class ByteDecoder:
    """Decode tokens that are bytes: text is their UTF-8, U+FFFD for what is none, as `tokenizers` has it (ByteLevel)."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: Container[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See `TokenDecoder`."""
        return "" if token_id in self._skipped else self._utf8.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """See `TokenDecoder`."""
        return self._utf8.decode(b"", final=True)


class TextDecoder:
    """Decode tokens whose text depends on those before them: a word behind another one has a space, the first has none.

    byte_ids are tokens that stand for one byte each where no other token fits. A run of them is decoded as a whole, since
    one byte that is no UTF-8 makes U+FFFD of all of them (`tokenizers`, ByteFallback), so it is held until it ends; a
    token that decode skips does not end it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], byte_ids: Container[int], skipped: Container[int]
    ) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._skipped = skipped
        self._before: list[int] = []
        """The latest tokens that gave text, and those behind them that gave none."""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """See `TokenDecoder`."""
        if token_id in self._byte_ids or (self._held and token_id in self._skipped):
            self._held.append(token_id)
            return ""
        text = self._take(self._held) if self._held else ""
        return text + self._take([token_id])

    def flush(self) -> str:
        """See `TokenDecoder`."""
        return self._take(self._held) if self._held else ""

    def _take(self, token_ids: list[int]) -> str:
        before = self._decode(self._before) if self._before else ""
        text = self._decode([*self._before, *token_ids])[len(before) :]
        # Without text they may still decide how the next one begins, and so does what was before them.
        self._before = list(token_ids) if text else [*self._before, *token_ids][-_MAX_BEFORE:]
        self._held = []
        return text
