"""Holds the log probabilities of a prompt's own tokens while its request runs, and tracks known and sent ones. Pure.

The logits of the position before a token score it. So the first token has no score, and each other score is known once
the model has read the tokens before it. No score is sent before the first token of an answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sie.values.generate import PromptPiece
from sie.workers.model_api import Scored

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express; OpenAI's value."""
_NUMBER_BYTES = 4


class PromptScores:
    """The scores of one prompt: entry i is for its token i + 1."""

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self.num_top = num_top
        self.num_scores = num_prompt - 1
        self.num_known = self.num_sent = 0
        self._own = np.empty(self.num_scores, np.float32)
        self._top_ids = np.empty((self.num_scores, num_top), np.int32)
        self._top = np.empty((self.num_scores, num_top), np.float32)

    @property
    def num_unsent(self) -> int:
        """Entries that are not sent yet."""
        return self.num_scores - self.num_sent

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in a frame."""
        return _NUMBER_BYTES * (1 + 2 * self.num_top)

    def count_rows(self, start: int, count: int) -> int:
        """Return how many of count positions from start on need their logits."""
        return max(0, min(start + count, self.num_scores) - max(start, self.num_known))

    def limit(self, start: int, count: int, max_rows: int) -> int:
        """Return how many of count positions from start on need at most max_rows logits."""
        over = self.count_rows(start, count) - max_rows
        return count if over <= 0 else max(0, max(start, self.num_known) + max_rows - start)

    def wanted(self, token_ids: NDArray[np.int32], start: int, count: int) -> Scored | None:
        """Return the tokens to score in a step that reads count prompt tokens (t,) from start on, or None."""
        num_rows = self.count_rows(start, count)
        if not num_rows:
            return None
        first = max(start, self.num_known)
        last = first + num_rows
        return Scored(
            first - start, token_ids[first + 1 : last + 1],
            self._own[first:last], self._top_ids[first:last], self._top[first:last],
        )  # fmt: skip

    def note_read(self, end: int) -> None:
        """Note that the model has read the positions before end."""
        self.num_known = max(self.num_known, min(end, self.num_scores))

    def piece(self, count: int) -> PromptPiece:
        """Return the next entries to send."""
        part = slice(self.num_sent, self.num_sent + count)
        return PromptPiece(
            self.num_sent, self._own[part].tobytes(), self._top_ids[part].tobytes(), self._top[part].tobytes()
        )

    def note_sent(self, piece: PromptPiece) -> None:
        """Note that a piece was sent."""
        self.num_sent += len(piece.own) // _NUMBER_BYTES
