"""Collects a prompt's log probabilities from the pieces that a worker sends. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.frontend.generation.vocabulary import Vocabulary
from sie.values.errors import Internal
from sie.values.generate import LogprobText, PromptPiece, PromptScored


class PromptReader:
    """The log probabilities of one prompt. number: the prompt number in its event."""

    def __init__(self, number: int, vocabulary: Vocabulary, token_ids: Sequence[int]) -> None:
        self._number = number
        self._vocabulary = vocabulary
        self._token_ids = token_ids
        self._num_read = 1
        self._pieces: list[PromptPiece] = []

    def read(self, piece: PromptPiece) -> None:
        """Read the next tokens. Raises Internal for a piece that does not follow the last one."""
        count = len(piece.own) // np.dtype("<f4").itemsize
        if piece.index != self._num_read - 1 or self._num_read + count > len(self._token_ids) or not count:
            raise Internal(f"a worker sent log probabilities of a prompt from number {piece.index} on, out of order")
        self._num_read += count
        self._pieces.append(piece)

    def finish(self) -> PromptScored:
        """Return the complete log probabilities. Raises Internal if some are missing."""
        if self._num_read != len(self._token_ids):
            raise Internal("a worker left out log probabilities of a prompt")
        return PromptScored(self._number, ScoredTokens(self._vocabulary, self._token_ids, self._pieces))


class ScoredTokens(Sequence[LogprobText]):
    """The tokens of a prompt, made when they are read: a prompt's alternatives would take much memory and time as objects.

    Any thread may read them.
    """

    def __init__(self, vocabulary: Vocabulary, token_ids: Sequence[int], pieces: Sequence[PromptPiece]) -> None:
        num_rows = max(1, len(token_ids) - 1)  # a prompt of one token has none, for which NumPy cannot find -1
        self._token_bytes = vocabulary.token_bytes
        self._token_ids = token_ids
        self._own = _joined([piece.own for piece in pieces], "<f4")
        self._top_ids = _joined([piece.top_ids for piece in pieces], "<i4").reshape(num_rows, -1)
        self._top = _joined([piece.top for piece in pieces], "<f4").reshape(num_rows, -1)

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        """Return one token; index is a number."""
        number = range(len(self))[int(index)]
        if not number:
            return self._named(self._token_ids[0], 0.0)
        top = tuple(map(self._named, self._top_ids[number - 1].tolist(), self._top[number - 1].tolist()))
        return self._named(self._token_ids[number], self._own[number - 1].item(), top)

    def __iter__(self) -> Iterator[LogprobText]:
        return map(self.__getitem__, range(len(self)))

    def _named(self, token_id: int, value: float, top: tuple[LogprobText, ...] = ()) -> LogprobText:
        raw = self._token_bytes(token_id)
        return LogprobText(text=text_of(raw), raw=raw, logprob=value, top=top)


def _joined(parts: Sequence[bytes], dtype: str) -> NDArray[Any]:
    return np.frombuffer(b"".join(parts), dtype)


@functools.lru_cache(maxsize=65536)
def text_of(raw: bytes) -> str:
    """Return the text of a token's bytes."""
    return raw.decode(errors="replace")
