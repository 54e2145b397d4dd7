"""Owns how long a worker's tokens take, as measured, and so what a step may hold and is allowed. Pure: times are passed in."""

from __future__ import annotations

from typing import Final

_FIRST_TOKEN_NS: Final = 2_000_000.0
_MIN_ALLOWED_NS: Final = 250_000_000
_SLACK: Final = 10
"""A step may take this many times as long as its tokens usually do before the watchdog's time starts."""
_WEIGHT: Final = 0.1


class Pace:
    """The pace of one worker's models."""

    def __init__(self, max_tokens: dict[str, float], target_ns: int = 0) -> None:
        """Keep in max_tokens, for others to read, how many tokens a step of a model may hold to take about target_ns.

        A model whose steps take less has no entry; with 0 none ever has.
        """
        self._ns_per_token: dict[str, float] = {}
        """By model: a token of an image costs a detector a thousand times what one of a text costs a small encoder."""
        self._max_tokens = max_tokens
        self._target_ns = target_ns

    def allowed_ns(self, model: str, num_tokens: int) -> int:
        """Return how long a step may take."""
        return int(_MIN_ALLOWED_NS + _SLACK * self._ns_per_token.get(model, _FIRST_TOKEN_NS) * num_tokens)

    def learn(self, model: str, num_tokens: int, took_ns: int) -> None:
        """Take a step into account."""
        if num_tokens:
            known = self._ns_per_token.get(model, took_ns / num_tokens)  # the first step takes the place of the guess
            self._ns_per_token[model] = known + _WEIGHT * (took_ns / num_tokens - known)

    def adapt(self, model: str, num_tokens: int, took_ns: int) -> None:
        """Bring the size of a model's steps nearer to what would take the target, by a factor of two at most.

        took_ns is the step's own time, without what other processes took from it: smaller steps would not help.

        A pace for each token would not do: a short step costs far more for each of its tokens than a long one, so only
        steps that took too long, or were about as large as they may be, say something.
        """
        if not (self._target_ns and num_tokens and took_ns > 0):
            return
        limit = self._max_tokens.get(model)
        wanted = num_tokens * self._target_ns / took_ns
        if took_ns > self._target_ns:
            largest = num_tokens if limit is None else min(limit, num_tokens)
            self._max_tokens[model] = max(1.0, wanted, largest / 2)
        elif limit is not None and num_tokens * 2 > limit:
            self._max_tokens[model] = max(limit, min(wanted, limit * 2))
