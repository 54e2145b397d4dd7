"""Owns how long a worker's tokens take, as measured, and so what a step is allowed. Pure: times are passed in."""

from __future__ import annotations

from typing import Final

_FIRST_TOKEN_NS: Final = 2_000_000.0
_MIN_ALLOWED_NS: Final = 250_000_000
_SLACK: Final = 10
"""A step may take this many times as long as its tokens usually do before the watchdog's time starts."""
_WEIGHT: Final = 0.1


class Pace:
    """The pace of one worker's models."""

    def __init__(self, ns_per_token: dict[str, float]) -> None:
        """Keep the paces in ns_per_token, for others to read.

        By model: a token of an image costs a detector a thousand times what one of a text costs a small encoder.
        """
        self._ns_per_token = ns_per_token

    def allowed_ns(self, model: str, num_tokens: int) -> int:
        """Return how long a step may take."""
        return int(_MIN_ALLOWED_NS + _SLACK * self._ns_per_token.get(model, _FIRST_TOKEN_NS) * num_tokens)

    def learn(self, model: str, num_tokens: int, took_ns: int) -> None:
        """Take a step into account."""
        if num_tokens:
            known = self._ns_per_token.get(model, took_ns / num_tokens)  # the first step takes the place of the guess
            self._ns_per_token[model] = known + _WEIGHT * (took_ns / num_tokens - known)
