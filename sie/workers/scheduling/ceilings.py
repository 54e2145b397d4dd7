"""Limits the size of a model's steps after one ran out of memory. Pure: the caller passes the time."""

from __future__ import annotations

import msgspec

_DOUBLES_NS = 60_000_000_000
"""A ceiling doubles after this time: the memory may be free again, and a try costs little."""

_AFTER_KILL_NS = 600_000_000_000


class Ceiling(msgspec.Struct, frozen=True):
    """The most tokens in one step of a model, as of since_ns."""

    num_tokens: int
    since_ns: int

    def max_tokens(self, now_ns: int) -> int:
        """Return the current limit."""
        doublings, rest_ns = divmod(max(0, now_ns - self.since_ns), _DOUBLES_NS)
        if doublings >= 32:
            return self.num_tokens << 32
        return (self.num_tokens << doublings) + (self.num_tokens << doublings) * rest_ns // _DOUBLES_NS


def lower_ceiling(before: Ceiling | None, failed_tokens: int, now_ns: int) -> Ceiling:
    """Return the ceiling after a step of failed_tokens ran out of memory: half, never above the previous one."""
    num_tokens = max(1, failed_tokens // 2)
    return Ceiling(num_tokens if before is None else min(num_tokens, before.max_tokens(now_ns)), now_ns)


def ceiling_after_kill(num_tokens: int, now_ns: int) -> Ceiling | None:
    """Return the first ceiling of a worker whose predecessor was killed for memory; None for num_tokens 0.

    It stays for ten minutes before it grows: another kill costs all of a worker's models, not only a step.
    """
    return Ceiling(num_tokens, now_ns + _AFTER_KILL_NS) if num_tokens else None


def drop_outgrown(ceilings: dict[str, Ceiling], max_tokens: int, now_ns: int) -> None:
    """Remove the ceilings that are no longer below a step's own budget."""
    for model in [name for name, ceiling in ceilings.items() if ceiling.max_tokens(now_ns) >= max_tokens]:
        del ceilings[model]
