"""Owns how long a worker's tokens take, as measured: what a step is allowed, and what one of tensors has cost.

Pure: times are passed in.
"""

from __future__ import annotations

from typing import Final

from sie.cards import ModelCard

_FIRST_TOKEN_NS: Final = 2_000_000.0
_MIN_ALLOWED_NS: Final = 1_000_000_000
_SLACK: Final = 10
"""A step may take this many times as long as its tokens usually do before the watchdog's time starts."""
_WEIGHT: Final = 0.1


class Pace:
    """The pace of one worker's models."""

    def __init__(self, ns_per_token: dict[str, float]) -> None:
        """Keep the paces of models in ns_per_token, for others to read."""
        self._ns_per_token = ns_per_token
        """By model: a token of an image costs a detector a thousand times what one of a text costs a small encoder."""
        self._of_tokens = _FIRST_TOKEN_NS
        """Over the steps of all models but those of tensors, whose tokens stand for bytes."""

    def allowed_ns(self, card: ModelCard, num_tokens: int) -> int:
        """Return how long a step may take."""
        return int(_MIN_ALLOWED_NS + _SLACK * self._ns_per_token.get(card.id, _FIRST_TOKEN_NS) * num_tokens)

    def learn(self, card: ModelCard, num_tokens: int, took_ns: int) -> int:
        """Take a step into account; return the tokens that it cost beyond its own.

        Tensors cost what the worker's other models would have run in that time, so that neither starves the other.
        """
        if not num_tokens:
            return 0
        pace = took_ns / num_tokens
        known = self._ns_per_token.get(card.id, _FIRST_TOKEN_NS)
        self._ns_per_token[card.id] = known + _WEIGHT * (pace - known)
        if card.tensor is None:
            self._of_tokens += _WEIGHT * (pace - self._of_tokens)
            return 0
        return max(0, int(took_ns / self._of_tokens) - num_tokens)
