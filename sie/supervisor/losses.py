"""Plans the restart of a worker that lost its device or ran out of memory. Pure: the caller passes the time."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_LOSSES: Final = 3
WINDOW_S: Final = 60.0
_MAX_WAIT_S: Final = 3600.0
_LEAST_TOKENS: Final = 32
FORGET_KILL_S: Final = 600.0
"""A worker that lives so long ends the limit on its steps that an earlier kill for memory set."""


class DeviceLosses(msgspec.Struct):
    """When workers of one slot lost their device, in seconds on a monotonic clock."""

    lost_at_s: list[float] = []
    num_set_aside: int = 0
    """How many times in a row the slot was set aside."""
    resumes_at_s: float = 0.0


def plan_after_loss(losses: DeviceLosses, now_s: float, retry_s: float) -> float:
    """Return the seconds to wait before restarting a worker that lost its device.

    0 for the first losses within a minute, since most such errors end with the process. After that the device itself
    counts as lost. It is tried once after retry_s; each further failure doubles the wait, up to an hour.
    """
    losses.lost_at_s = [*(at for at in losses.lost_at_s if at > now_s - WINDOW_S), now_s]
    if not losses.num_set_aside or now_s > losses.resumes_at_s + WINDOW_S:
        losses.num_set_aside = 0
        if len(losses.lost_at_s) < MAX_LOSSES:
            return 0.0
    wait_s = min(retry_s * 2 ** min(losses.num_set_aside, 30), _MAX_WAIT_S)
    losses.num_set_aside += 1
    losses.resumes_at_s = now_s + wait_s
    losses.lost_at_s = []
    return wait_s


def tokens_after_kill(before: int, killed_tokens: int) -> int:
    """Return the token limit of the next worker's steps after the kernel killed one for memory during a step.

    It is a quarter of the killed step's tokens, since each try costs a worker, and never above the limit in force. It
    is at least _LEAST_TOKENS, since memory that so small a step does not find was taken by something else. It is 0 if neither is known.
    """
    quarter = max(_LEAST_TOKENS, killed_tokens // 4) if killed_tokens else 0
    return min(filter(None, (before, quarter)), default=0)
