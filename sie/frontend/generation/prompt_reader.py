"""Collects a prompt's log probabilities from the pieces that a worker sends. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from sie.frontend.generation.vocabulary import Vocabulary
from sie.values.errors import Internal
from sie.values.generate import LogprobText, PromptPiece, PromptScored


class PromptReader:
    """The log probabilities of one prompt. number: the prompt number in its event."""

    def __init__(self, number: int, vocabulary: Vocabulary, token_ids: Sequence[int]) -> None:
        self._number = number
        self._vocabulary = vocabulary
        self._token_ids = token_ids
        self._tokens = [self._named(token_ids[0], 0.0)]

    def read(self, piece: PromptPiece) -> None:
        """Read the next tokens. Raises Internal for a piece that does not follow the last one."""
        first = len(self._tokens)
        own = np.frombuffer(piece.own, "<f4")
        last = first + len(own)
        if piece.index != first - 1 or last > len(self._token_ids) or not len(own):
            raise Internal(f"a worker sent log probabilities of a prompt from number {piece.index} on, out of order")
        top_ids = np.frombuffer(piece.top_ids, "<i4").reshape(len(own), -1).tolist()
        top = np.frombuffer(piece.top, "<f4").reshape(len(own), -1).tolist()
        for token_id, value, ids, values in zip(self._token_ids[first:last], own.tolist(), top_ids, top, strict=True):
            self._tokens.append(self._named(token_id, value, tuple(map(self._named, ids, values))))

    def finish(self) -> PromptScored:
        """Return the complete log probabilities. Raises Internal if some are missing."""
        if len(self._tokens) != len(self._token_ids):
            raise Internal("a worker left out log probabilities of a prompt")
        return PromptScored(self._number, tuple(self._tokens))

    def _named(self, token_id: int, value: float, top: tuple[LogprobText, ...] = ()) -> LogprobText:
        raw = self._vocabulary.token_bytes(token_id)
        return LogprobText(text=_text(raw), raw=raw, logprob=value, top=top)


@functools.lru_cache(maxsize=65536)
def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
