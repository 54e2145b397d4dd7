"""Turns tokens that arrive one by one into text. Pure.

However the tokens are split, the joined texts equal the text of all tokens decoded at once. A character comes with the
token that completes it. Bytes that no token completes become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Protocol

_MAX_BEFORE: Final = 16
_REPLACEMENT: Final = "\ufffd"


class TokenDecoder(Protocol):
    """Decodes one answer. Ids come in order, each once."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token."""
        ...

    def flush(self) -> str:
        """Return the remaining text after the last token."""
        ...


class ByteDecoder:
    """Decodes tokens that are bytes as UTF-8, with U+FFFD for invalid bytes, as `tokenizers` does (ByteLevel)."""

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
    """Decodes tokens whose text depends on earlier tokens: every word but the first has a space before it.

    bytes_of: the tokens that stand for one byte each where no other token fits; empty, or one token for each byte.
    Decoded at once, a run of them with one invalid byte is U+FFFD throughout (`tokenizers`, ByteFallback). Here each
    character comes when it is complete, as from `tokenizers`' DecodeStream; invalid bytes count as the bytes of U+FFFD.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], bytes_of: Mapping[int, int], skipped: Container[int]
    ) -> None:
        self._decode = decode
        self._bytes_of = bytes_of
        self._id_of = {byte: token_id for token_id, byte in bytes_of.items()}
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        """Holds the bytes of an incomplete character."""
        self._before: list[int] = []
        """The latest tokens that gave text, and the tokens after them that gave no text."""
        self._num_shown = 0
        """Number of characters of their text already returned."""
        self._held = ""
        """The last character of their text while it is U+FFFD, since the next token may complete it."""

    def push(self, token_id: int) -> str:
        """See `TokenDecoder`."""
        if token_id in self._skipped:
            return ""
        byte = self._bytes_of.get(token_id)
        if byte is None:
            return self._take([*self._spell(self._utf8.decode(b"", final=True)), token_id])
        complete = self._utf8.decode(bytes((byte,)))
        return self._take(self._spell(complete)) if complete else ""

    def flush(self) -> str:
        """See `TokenDecoder`."""
        broken = self._utf8.decode(b"", final=True)
        text = self._take(self._spell(broken)) if broken else ""
        return text + self._held

    def _spell(self, text: str) -> list[int]:
        return [self._id_of[byte] for byte in text.encode()]

    def _take(self, token_ids: list[int]) -> str:
        self._before += token_ids
        whole = self._decode(self._before)
        is_cut = whole.endswith(_REPLACEMENT) and token_ids[-1] not in self._bytes_of
        self._held = _REPLACEMENT if is_cut else ""
        text = whole[self._num_shown : len(whole) - len(self._held)]
        if text and not self._held:
            self._cut(len(token_ids))
        elif len(self._before) > _MAX_BEFORE:
            # Tokens without text, and those before them, may still decide how the next text begins.
            self._cut(_MAX_BEFORE)
        else:
            self._num_shown += len(text)
        return text

    def _cut(self, num_tokens: int) -> None:
        self._before = self._before[-num_tokens:]
        self._num_shown = len(self._decode(self._before)) - len(self._held)
