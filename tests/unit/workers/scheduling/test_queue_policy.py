"""Priorities and queue policies: the order of requests, delays, and refusals."""

from __future__ import annotations

import pytest

from sie.values.tensor import QueuePolicy, TensorRule
from sie.values.work import TensorTask
from sie.workers.scheduling.queue_policy import policy_of
from sie.workers.scheduling.scheduler import State, plan_step
from sie.workers.scheduling.waiting import Budget, RequestPolicy, Step, WaitingItem

NEVER_NS = 1 << 62
BUDGET = Budget(max_tokens=100, max_items=64, max_age_ns=1000)


def waiting(name: str, policy: RequestPolicy, *, deadline_ns: int = NEVER_NS, max_rows: int = 1) -> WaitingItem:
    return WaitingItem(name, 0, 1, 0, deadline_ns, batch_key="alike", max_rows=max_rows, policy=policy)


def state_of(*items: WaitingItem) -> State:
    state = State()
    for item in items:
        state.add("m", item)
    return state


def names(step: Step | None) -> list[str]:
    assert step is not None
    return [item.request for item in step.items]


def order(state: State, now_ns: int = 0) -> list[str]:
    """Run steps until nothing waits, and return what ran, in order."""
    ran: list[str] = []
    while (step := plan_step(state, BUDGET, now_ns)) is not None:
        state.remove(step)
        ran += names(step)
    return ran


def rule(num_priorities: int = 0, default: int = 0, **policies: QueuePolicy) -> TensorRule:
    return TensorRule(
        name="m", version="1", platform="", inputs=(), outputs=(), num_priorities=num_priorities, default_priority=default,
        queue_policies={int(level.removeprefix("level")): policy for level, policy in policies.items()},
    )  # fmt: skip


def task(priority: int = 0, timeout_us: int = 0) -> TensorTask:
    return TensorTask((), (), 1, priority, timeout_us)


def test_lower_priorities_go_first_and_equal_ones_in_their_order():
    state = state_of(
        *[
            waiting(f"{name}{level}", RequestPolicy(level))
            for name, level in zip("abcdef", (2, 1, 3, 1, 2, 1), strict=True)
        ]
    )
    assert order(state) == ["b1", "d1", "f1", "a2", "e2", "c3"]


def test_a_step_is_filled_up_with_lower_priorities():
    state = state_of(
        *[waiting(name, RequestPolicy(level), max_rows=3) for name, level in zip("abcd", (3, 2, 1, 2), strict=True)]
    )
    assert names(plan_step(state, BUDGET, 0)) == ["c", "b", "d"]


def test_one_of_a_high_priority_overtakes_more_than_a_plan_looks_at():
    budget = Budget(max_tokens=100, max_items=64, max_age_ns=1000, window_items=4)
    state = state_of(
        *[waiting(str(number), RequestPolicy(2)) for number in range(50)], waiting("first", RequestPolicy(1))
    )
    assert names(plan_step(state, budget, 0)) == ["first"]


def test_what_waited_too_long_is_refused_and_never_runs():
    state = state_of(
        waiting("late", RequestPolicy(1, until_ns=10)),
        waiting("patient", RequestPolicy(1)),
        waiting("soon", RequestPolicy(1, until_ns=11)),
    )
    step = plan_step(state, BUDGET, 10)
    assert step is not None
    assert [(refused.item.request, refused.reason) for refused in step.refused] == [("late", "timeout")]
    state.remove(step)
    assert [*names(step), *order(state, 10)] == ["patient", "soon"]


def test_a_step_may_only_refuse():
    state = state_of(waiting("late", RequestPolicy(1, until_ns=10)))
    step = plan_step(state, BUDGET, 10)
    assert step is not None
    assert (step.items, len(step.refused)) == ([], 1)
    state.remove(step)
    assert not state


def test_what_is_delayed_goes_behind_its_own_priority_and_before_the_next():
    state = state_of(
        waiting("late", RequestPolicy(1, until_ns=10, delays=True)),
        waiting("lower", RequestPolicy(2)),
        waiting("timely", RequestPolicy(1)),
    )
    assert order(state, 9) == ["late", "timely", "lower"]
    state = state_of(
        waiting("late", RequestPolicy(1, until_ns=10, delays=True)),
        waiting("lower", RequestPolicy(2)),
        waiting("timely", RequestPolicy(1)),
    )
    assert order(state, 10) == ["timely", "late", "lower"]


def test_a_full_queue_refuses_the_latest_of_its_own_priority():
    state = state_of(
        *[waiting(f"a{number}", RequestPolicy(1, max_requests=2)) for number in range(4)],
        waiting("b", RequestPolicy(2, max_requests=1)),
    )
    step = plan_step(state, BUDGET, 0)
    assert step is not None
    assert [(refused.item.request, refused.reason) for refused in step.refused] == [("a2", "size"), ("a3", "size")]
    state.remove(step)
    assert [*names(step), *order(state)] == ["a0", "a1", "b"]


def test_a_deadline_also_ends_a_request_that_is_next():
    state = state_of(waiting("a", RequestPolicy(2), deadline_ns=5), waiting("b", RequestPolicy(1)))
    step = plan_step(state, BUDGET, 5)
    assert step is not None
    assert ([item.request for item in step.expired], names(step)) == (["a"], ["b"])


def test_no_priorities_and_no_policies_are_no_turn():
    assert policy_of(rule(), task(3, 5), 0) is None
    assert policy_of(rule(2, 1), task(2), 0) == RequestPolicy(2)


@pytest.mark.parametrize(
    ("policy", "timeout_us", "until_ns"),
    [
        (QueuePolicy(timeout_us=7), 0, 7_100), (QueuePolicy(timeout_us=7), 3, 7_100),
        (QueuePolicy(timeout_us=7, may_shorten=True), 3, 3_100), (QueuePolicy(timeout_us=7, may_shorten=True), 9, 7_100),
        (QueuePolicy(may_shorten=True), 9, 9_100), (QueuePolicy(may_shorten=True), 0, 0), (QueuePolicy(), 9, 0),
    ],
)  # fmt: skip
def test_a_requests_own_timeout_may_only_shorten(policy: QueuePolicy, timeout_us: int, until_ns: int):
    assert policy_of(rule(level0=policy), task(0, timeout_us), 100) == RequestPolicy(0, until_ns)


def test_a_priority_has_its_own_policy_or_the_one_for_all():
    found = rule(3, 2, level0=QueuePolicy(max_requests=5), level3=QueuePolicy(delays=True, timeout_us=1))
    assert policy_of(found, task(1), 0) == RequestPolicy(1, max_requests=5)
    assert policy_of(found, task(3), 0) == RequestPolicy(3, until_ns=1000, delays=True)
    assert policy_of(rule(3, 2, level3=QueuePolicy(max_requests=1)), task(2), 0) == RequestPolicy(2)
