"""Measures the time a worker's tokens take, and derives step sizes and time allowances. Pure: times are passed in."""

from __future__ import annotations

from typing import Final

_FIRST_TOKEN_NS: Final = 2_000_000.0
_MIN_ALLOWED_NS: Final = 250_000_000
_SLACK: Final = 10
"""A step may take this many times its usual duration before the watchdog's time starts."""
_WEIGHT: Final = 0.1


class Pace:
    """The measured pace of one worker's models."""

    def __init__(self, max_tokens: dict[str, float], target_ns: int = 0) -> None:
        """Write into max_tokens, which others read, the tokens with which a model's step takes about target_ns.

        A model whose steps are shorter has no entry. With target_ns 0, no model has one.
        """
        self._ns_per_token: dict[str, float] = {}
        """By model, because costs differ: a detector's image token takes a thousand times as long as a small encoder's
        text token.
        """
        self._max_tokens = max_tokens
        self._target_ns = target_ns

    def allowed_ns(self, model: str, num_tokens: int) -> int:
        """Return how long a step may take."""
        return int(_MIN_ALLOWED_NS + _SLACK * self._ns_per_token.get(model, _FIRST_TOKEN_NS) * num_tokens)

    def record(self, model: str, num_tokens: int, took_ns: int) -> None:
        """Update the average with a step's time."""
        if num_tokens:
            average = self._ns_per_token.get(model, took_ns / num_tokens)  # the first step replaces the default
            self._ns_per_token[model] = average + _WEIGHT * (took_ns / num_tokens - average)

    def adapt(self, model: str, num_tokens: int, took_ns: int) -> None:
        """Move a model's step size towards the target duration, by a factor of two at most.

        The caller chooses the clock of took_ns. Steps of items on a CPU pass processor time: on a busy machine any step
        takes longer, whatever its size. Steps with prompts beside running streams pass the time on the wall, which is
        what the readers of the streams wait. Short steps cost far more per token than long ones, so time per token says
        nothing here: only steps that took too long, or were close to the size limit, change the size.
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
