"""Decides whether a request may enter, before any work is done for it. Pure."""

from __future__ import annotations

import math

from sie.values.errors import Overloaded

_MIN_RETRY_S = 1
_MAX_RETRY_S = 60


def retry_after_s(queued_tokens: int, tokens_per_s: float) -> int:
    """Return the whole seconds, 1 to 60, until the queue is empty at its present rate."""
    if tokens_per_s <= 0:
        return _MIN_RETRY_S
    return max(_MIN_RETRY_S, min(_MAX_RETRY_S, math.ceil(queued_tokens / tokens_per_s)))


def check_queue(queued_tokens: int, num_tokens: int, max_queued_tokens: int, tokens_per_s: float) -> None:
    """Raise Overloaded if num_tokens more would exceed max_queued_tokens. An empty queue takes any one request."""
    if queued_tokens and queued_tokens + num_tokens > max_queued_tokens:
        raise overloaded("the queue holds max_queued_tokens", queued_tokens, tokens_per_s)


def overloaded(reason: str, queued_tokens: int, tokens_per_s: float) -> Overloaded:
    """Return the refusal for a full queue, ring or segment."""
    wait_s = retry_after_s(queued_tokens, tokens_per_s)
    return Overloaded(f"The server is at its limit: {reason}; retry in {wait_s} s", retry_after_s=wait_s)
