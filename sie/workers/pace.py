"""Owns how long a worker's tokens take, as measured: what a step is allowed, and what one of tensors has cost.

Pure: times are passed in.
"""

from __future__ import annotations

from typing import Final

from sie.cards import ModelCard

_FIRST_TOKEN_NS: Final = 2_000_000
_MIN_ALLOWED_NS: Final = 1_000_000_000
_SLACK: Final = 10
"""A step may take this many times as long as its tokens usually do before the watchdog's time starts."""
_WEIGHT: Final = 0.1


class Pace:
    """The pace of one worker: one for all models of tokens, one for each model of tensors.

    The tokens of a model of tensors stand for bytes, which say little about the work.
    """

    def __init__(self) -> None:
        self._ns_per_token = float(_FIRST_TOKEN_NS)
        self._of_tensors: dict[str, float] = {}

    def allowed_ns(self, card: ModelCard, num_tokens: int) -> int:
        """Return how long a step may take."""
        pace = self._ns_per_token if card.tensor is None else self._of_tensors.get(card.id, _FIRST_TOKEN_NS)
        return int(_MIN_ALLOWED_NS + _SLACK * pace * num_tokens)

    def learn(self, card: ModelCard, num_tokens: int, took_ns: int) -> int:
        """Take a step into account; return the tokens that it cost beyond its own.

        Tensors cost what the worker's models of tokens would have run in that time, so that neither starves the other.
        """
        if not num_tokens:
            return 0
        if card.tensor is None:
            self._ns_per_token += _WEIGHT * (took_ns / num_tokens - self._ns_per_token)
            return 0
        pace = self._of_tensors.get(card.id, _FIRST_TOKEN_NS)
        self._of_tensors[card.id] = pace + _WEIGHT * (took_ns / num_tokens - pace)
        return max(0, int(took_ns / self._ns_per_token) - num_tokens)
