"""Decides what follows when a worker's device or its memory was the end of it. Pure: the caller passes the time."""

from __future__ import annotations

from typing import Final

import msgspec

DEVICE_LOST_STATUS: Final = 75
"""Of a worker that ended since its device is of no more use to it: `sie.workers.device.faults`."""
MAX_LOSSES: Final = 3
WINDOW_S: Final = 60.0
_MAX_WAIT_S: Final = 3600.0


class DeviceLosses(msgspec.Struct):
    """When workers of one slot lost their device, in seconds on a monotonic clock."""

    lost_at_s: list[float] = []
    num_set_aside: int = 0
    """How often in a row the slot was set aside."""
    resumes_at_s: float = 0.0


def plan_after_loss(losses: DeviceLosses, now_s: float, retry_s: float) -> float:
    """Return the seconds to wait before a worker that lost its device is started again.

    0 for the first losses within a minute: most such errors end with the process. Then the device itself is taken to be
    gone: it is tried once after retry_s, and, while that fails, after twice as long each time, up to an hour.
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
    """Return the most tokens in a step of the next worker, when the kernel killed one for want of memory in a step.

    A quarter of that step's, since each try costs a worker, and never above the limit that was in force; 0 where neither
    is known.
    """
    quarter = max(1, killed_tokens // 4) if killed_tokens else 0
    return min(filter(None, (before, quarter)), default=0)
