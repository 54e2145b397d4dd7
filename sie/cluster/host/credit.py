"""Decides how many work items a host takes now. Pure.

The credit follows from what the engine already has: enough work for the next steps, and no more, so that a slower host
takes less, and work stays in the stream where every host can take it.
"""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.1
_STEPS_AHEAD: Final = 2
_FIRST_ITEMS: Final = 8
"""Items for each worker until one was answered: before that nobody knows what they cost."""


class Credit:
    """The work items that may be taken, over all models of a host."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._tokens_per_item = 1.0
        self._num_measured = 0
        self.num_running = 0
        """Items that were taken and are not answered."""

    def begin(self) -> None:
        """Count an item that was taken."""
        self.num_running += 1

    def end(self, num_tokens: int) -> None:
        """Count an item that is answered; num_tokens is its cost, 0 if it never ran."""
        self.num_running -= 1
        if num_tokens:
            self._num_measured += 1
            share = max(_SMOOTHING, 1 / self._num_measured)
            self._tokens_per_item += (num_tokens - self._tokens_per_item) * share

    def room(self, queued_tokens: int, max_step_tokens: int, num_workers: int) -> int:
        """Return how many items to take beside those that run, at most.

        queued_tokens are all tokens at these workers, those of local requests too. Without a worker there is no room.
        """
        left_tokens = _STEPS_AHEAD * max_step_tokens * num_workers - queued_tokens
        by_tokens = int(left_tokens / self._tokens_per_item)
        if not self._num_measured:
            by_tokens = min(by_tokens, _FIRST_ITEMS * num_workers - self.num_running)
        if num_workers and not self.num_running and left_tokens > 0:
            by_tokens = max(1, by_tokens)
        return max(0, min(by_tokens, self._max_items - self.num_running))
