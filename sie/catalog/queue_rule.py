"""Reads the queue settings in a tensor model's configuration: priorities, timeouts and bounds. Pure.

Source: Triton, ModelDynamicBatching and ModelQueuePolicy of model_config.proto.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sie.catalog.files import refuse
from sie.catalog.model_config import CONFIG_FILE
from sie.values.tensor import QueuePolicy

_DELAY = 1


class QueueRule(NamedTuple):
    """The queue settings; fields as in `TensorRule`."""

    num_priorities: int
    default_priority: int
    queue_policies: dict[int, QueuePolicy]


def read_queue_rule(model_id: str, config: Any) -> QueueRule:
    """Return the queue settings of `dynamic_batching`. Raises ModelLoadFailed for contradictory settings."""
    batching = config.dynamic_batching
    levels, default = batching.priority_levels, batching.default_priority_level
    where = f"{CONFIG_FILE}: dynamic_batching"
    if levels and not 1 <= default <= levels:
        raise refuse(model_id, f"{where}: default_priority_level is {default}, and priority_levels {levels}")
    if levels > 1 and batching.preserve_ordering:
        raise refuse(model_id, f"{where}: preserve_ordering allows one of priority_levels alone")
    policies: dict[int, QueuePolicy] = {}
    if batching.HasField("default_queue_policy"):
        policies[0] = _policy(batching.default_queue_policy)
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            raise refuse(model_id, f"{where}: priority_queue_policy has level {level} of {levels}")
        policies[level] = _policy(batching.priority_queue_policy[level])
    return QueueRule(levels, default if levels else 0, policies)


def _policy(policy: Any) -> QueuePolicy:
    return QueuePolicy(
        timeout_us=policy.default_timeout_microseconds,
        may_shorten=policy.allow_timeout_override,
        delays=policy.timeout_action == _DELAY,
        max_requests=policy.max_queue_size,
    )
