from __future__ import annotations

from sie.supervisor.losses import DeviceLosses, plan_after_loss, tokens_after_kill


def plans(*at_s: float) -> list[float]:
    own = DeviceLosses()
    return [plan_after_loss(own, now_s, 60.0) for now_s in at_s]


def test_third_loss_within_a_minute_sets_the_device_aside():
    assert plans(0, 30, 59) == [0, 0, 60]
    assert plans(0, 30, 61, 92, 123) == [0, 0, 0, 0, 0]


def test_a_try_that_fails_sets_it_aside_for_twice_as_long_up_to_an_hour():
    assert plans(0, 1, 2, 62, 183, 424, 905, 1866, 3787)[2:] == [60, 120, 240, 480, 960, 1920, 3600]


def test_a_minute_of_service_after_a_try_forgets_the_losses_before():
    assert plans(0, 1, 2, 123, 124, 125) == [0, 0, 60, 0, 0, 60]


def test_next_worker_takes_a_quarter_of_the_step_that_was_killed_and_never_more_than_before():
    assert tokens_after_kill(0, 4000) == 1000
    assert tokens_after_kill(800, 4000) == 800
    assert tokens_after_kill(2000, 2000) == 500
    assert tokens_after_kill(0, 1) == 32
    assert tokens_after_kill(0, 0) == 0
    assert tokens_after_kill(300, 0) == 300
