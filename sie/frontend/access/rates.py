"""Owns the arithmetic of a rate limit: a bucket that fills evenly. Pure: the time is passed in."""

from __future__ import annotations

from typing import Final

_NS_PER_MINUTE: Final = 60_000_000_000


class TokenBucket:
    """Lets `per_minute` requests through each minute, all of them at once if none came for a minute.

    Kept as the time at which the bucket was empty, or would have been (generic cell rate algorithm): one number, and
    no drift. Source: ITU-T I.371, appendix A.
    """

    __slots__ = ("_capacity_ns", "_cost_ns", "_empty_ns", "per_minute")

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._cost_ns = max(1, _NS_PER_MINUTE // per_minute)
        self._capacity_ns = max(_NS_PER_MINUTE, self._cost_ns)
        self._empty_ns = now_ns - self._capacity_ns

    def try_take(self, now_ns: int) -> bool:
        """Take one token, or return False when there is none."""
        empty_ns = max(self._empty_ns, now_ns - self._capacity_ns)
        if empty_ns + self._cost_ns > now_ns:
            return False
        self._empty_ns = empty_ns + self._cost_ns
        return True

    def charge(self, num_tokens: int, now_ns: int) -> None:
        """Take tokens that were used elsewhere, down to none."""
        empty_ns = max(self._empty_ns, now_ns - self._capacity_ns) + num_tokens * self._cost_ns
        self._empty_ns = min(empty_ns, now_ns)

    def remaining(self, now_ns: int) -> int:
        """Return how many tokens there are."""
        return min(self._capacity_ns, max(0, now_ns - self._empty_ns)) // self._cost_ns

    def wait_s(self, now_ns: int) -> float:
        """Return in how many seconds there is a token; 0 when there is one."""
        return max(0, self._empty_ns + self._cost_ns - now_ns) / 1e9

    def full_in_s(self, now_ns: int) -> float:
        """Return in how many seconds the bucket is full."""
        return max(0, self._empty_ns + self._capacity_ns - now_ns) / 1e9
