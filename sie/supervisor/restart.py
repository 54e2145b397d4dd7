"""Plans the restart of a dead child. Pure: the caller passes the time."""

from __future__ import annotations

import msgspec


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The number of starts that may fail, and the waits between them."""

    budget: int
    window_s: float
    backoff_s: float
    max_backoff_s: float = 30.0


class StartHistory(msgspec.Struct):
    """When starts of one slot failed, oldest first, in seconds on a monotonic clock."""

    failed_at_s: list[float] = []


def plan_restart(
    policy: RestartPolicy, history: StartHistory, was_ready: bool, now_s: float, *, was_killed: bool = False
) -> float | None:
    """Return the seconds to wait before the next start, or None to give the slot up.

    A ready child that dies restarts at once, and its earlier failures are forgotten. Only starts that died before they
    were ready count against the budget, and each doubles the wait. A start that another process killed does not count,
    because it might have succeeded.
    """
    if was_ready:
        history.failed_at_s.clear()
        return 0.0
    if was_killed:
        return policy.backoff_s
    history.failed_at_s[:] = [at for at in history.failed_at_s if at > now_s - policy.window_s]
    history.failed_at_s.append(now_s)
    num_failed = len(history.failed_at_s)
    if num_failed > policy.budget:
        return None
    return min(policy.backoff_s * 2 ** (num_failed - 1), policy.max_backoff_s)
