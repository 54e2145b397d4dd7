"""Decides in which order the requests of a tensor model with priorities or queue policies run, and which never do. Pure.

Source: Triton, ModelQueuePolicy and ModelDynamicBatching of model_config.proto.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sie.shm.extent_headers import TensorTask
from sie.values.tensor import QueuePolicy, TensorRule
from sie.workers.scheduling.waiting import Refused, Turn

if TYPE_CHECKING:
    from sie.workers.scheduling.waiting import Waiting

_ANY_PRIORITY = 0
_PATIENT = QueuePolicy()


def turn_of(rule: TensorRule, task: TensorTask, now_ns: int) -> Turn | None:
    """Return the turn of a request that arrives now; None for a model whose requests all have the same."""
    if not rule.num_priorities and not rule.queue_policies:
        return None
    policy = rule.queue_policies.get(task.priority) or rule.queue_policies.get(_ANY_PRIORITY, _PATIENT)
    timeout_us = policy.timeout_us
    if policy.may_shorten and task.timeout_us and (not timeout_us or task.timeout_us < timeout_us):
        timeout_us = task.timeout_us
    until_ns = now_ns + timeout_us * 1000 if timeout_us else 0
    return Turn(task.priority, until_ns, policy.delays, policy.max_requests)


def in_turn(queue: Iterable[Waiting], now_ns: int) -> tuple[list[Waiting], list[Refused]]:
    """Return what waits in the order in which it should run, and what is refused; queue is in order of arrival.

    What is delayed comes before what has a lower priority: only others of its own, and those above, overtake it.
    """
    counts: dict[int, int] = {}
    refused: list[Refused] = []
    ordered: list[tuple[int, bool, Waiting]] = []
    for item in queue:
        turn = item.turn
        assert turn is not None
        is_late = 0 < turn.until_ns <= now_ns
        if is_late and not turn.delays:
            refused.append(Refused(item, "timeout"))
            continue
        count = counts[turn.priority] = counts.get(turn.priority, 0) + 1
        if turn.max_requests and count > turn.max_requests:
            refused.append(Refused(item, "size"))
        else:
            ordered.append((turn.priority, is_late, item))
    ordered.sort(key=lambda one: one[:2])  # stable, so that equals keep the order in which they came
    return [item for _, _, item in ordered], refused
