"""Computes a rate limit with a bucket that fills evenly. Must not read a clock: the time is passed in."""

from __future__ import annotations

from typing import Final

_NS_PER_MINUTE: Final = 60_000_000_000


class TokenBucket:
    """Admits `per_minute` requests, or tokens of requests, in each minute, all at once if none came for a minute.

    The state is one number without drift: the time when the bucket was, or would have been, empty (generic cell rate
    algorithm). Source: ITU-T I.371, appendix A.
    """

    __slots__ = ("_capacity_ns", "_cost_ns", "empty_ns", "per_minute")

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._cost_ns = max(1, _NS_PER_MINUTE // per_minute)
        self._capacity_ns = max(_NS_PER_MINUTE, self._cost_ns)
        self.empty_ns = now_ns - self._capacity_ns
        """The time when the bucket was, or would have been, empty."""

    def try_take(self, now_ns: int) -> bool:
        """Take one token, or return False if there is none."""
        if not self.has_any(now_ns):
            return False
        self.spend(1, now_ns)
        return True

    def has_any(self, now_ns: int) -> bool:
        """Tell whether a token is in the bucket."""
        return max(self.empty_ns, now_ns - self._capacity_ns) + self._cost_ns <= now_ns

    def spend(self, num_tokens: int, now_ns: int) -> None:
        """Take tokens whose number was unknown before their request ran; the bucket may owe some afterwards."""
        self.empty_ns = max(self.empty_ns, now_ns - self._capacity_ns) + num_tokens * self._cost_ns

    def charge(self, num_tokens: int, now_ns: int) -> None:
        """Take tokens that other frontends used, until the bucket is empty."""
        self.spend(num_tokens, now_ns)
        self.empty_ns = min(self.empty_ns, now_ns)

    def remaining(self, now_ns: int) -> int:
        """Return the number of tokens in the bucket."""
        return min(self._capacity_ns, max(0, now_ns - self.empty_ns)) // self._cost_ns

    def wait_s(self, now_ns: int) -> float:
        """Return the seconds until the next token, or 0 if there is one."""
        return max(0, self.empty_ns + self._cost_ns - now_ns) / 1e9

    def full_in_s(self, now_ns: int) -> float:
        """Return the seconds until the bucket is full."""
        return max(0, self.empty_ns + self._capacity_ns - now_ns) / 1e9
