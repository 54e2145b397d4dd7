"""Orders the requests of a tensor model by priority and queue policy, and selects those to refuse. Pure.

Source: Triton, ModelQueuePolicy and ModelDynamicBatching of model_config.proto.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sie.values.tensor import QueuePolicy, TensorRule
from sie.values.work import TensorTask
from sie.workers.scheduling.waiting import Refused, RequestPolicy

if TYPE_CHECKING:
    from sie.workers.scheduling.waiting import WaitingItem

_ANY_PRIORITY = 0
_DEFAULT_POLICY = QueuePolicy()


def policy_of(rule: TensorRule, task: TensorTask, now_ns: int) -> RequestPolicy | None:
    """Return the policy for a request that arrives now; None if the model has neither priorities nor policies."""
    if not rule.num_priorities and not rule.queue_policies:
        return None
    policy = rule.queue_policies.get(task.priority) or rule.queue_policies.get(_ANY_PRIORITY, _DEFAULT_POLICY)
    timeout_us = policy.timeout_us
    if policy.may_shorten and task.timeout_us and (not timeout_us or task.timeout_us < timeout_us):
        timeout_us = task.timeout_us
    until_ns = now_ns + timeout_us * 1000 if timeout_us else 0
    return RequestPolicy(task.priority, until_ns, policy.delays, policy.max_requests)


def order_by_policy(queue: Iterable[WaitingItem], now_ns: int) -> tuple[list[WaitingItem], list[Refused]]:
    """Return the waiting items in the order to run, and the refused ones; queue is in order of arrival.

    A delayed item still runs before lower priorities. Only items of its own and higher priorities overtake it.
    """
    counts: dict[int, int] = {}
    refused: list[Refused] = []
    ordered: list[tuple[int, bool, WaitingItem]] = []
    for item in queue:
        policy = item.policy
        assert policy is not None
        is_late = 0 < policy.until_ns <= now_ns
        if is_late and not policy.delays:
            refused.append(Refused(item, "timeout"))
            continue
        count = counts[policy.priority] = counts.get(policy.priority, 0) + 1
        if policy.max_requests and count > policy.max_requests:
            refused.append(Refused(item, "size"))
        else:
            ordered.append((policy.priority, is_late, item))
    ordered.sort(key=lambda one: one[:2])  # stable: equal items keep their order of arrival
    return [item for _, _, item in ordered], refused
