from __future__ import annotations

from sie.supervisor.restart import RestartPolicy, StartHistory, plan_restart

POLICY = RestartPolicy(budget=3, window_s=60, backoff_s=0.5, max_backoff_s=1.5)


def test_death_in_service_restarts_at_once_however_often():
    history = StartHistory()
    assert [plan_restart(POLICY, history, True, now_s) for now_s in range(20)] == [0.0] * 20


def test_failed_starts_wait_twice_as_long_each_time_up_to_the_bound_and_then_end():
    history = StartHistory()
    assert [plan_restart(POLICY, history, False, now_s) for now_s in range(4)] == [0.5, 1.0, 1.5, None]


def test_only_failures_within_the_window_count():
    history = StartHistory()
    for now_s in (0, 1, 2):
        plan_restart(POLICY, history, False, now_s)
    assert plan_restart(POLICY, history, False, 61.5) == 1.0
    assert plan_restart(POLICY, history, False, 200) == 0.5


def test_success_forgets_earlier_failures():
    history = StartHistory()
    for now_s in (0, 1, 2):
        plan_restart(POLICY, history, False, now_s)
    plan_restart(POLICY, history, True, 3)
    assert plan_restart(POLICY, history, False, 4) == 0.5


def test_no_budget_means_no_second_try():
    policy = RestartPolicy(budget=0, window_s=60, backoff_s=0.5)
    assert plan_restart(policy, StartHistory(), False, 0) is None


def test_histories_are_not_shared():
    plan_restart(POLICY, StartHistory(), False, 0)
    assert StartHistory().failed_at_s == []


def test_a_start_that_was_killed_from_outside_does_not_count():
    history = StartHistory()
    assert [plan_restart(POLICY, history, False, now_s, was_killed=True) for now_s in range(20)] == [0.5] * 20
    assert plan_restart(POLICY, history, False, 20) == 0.5
