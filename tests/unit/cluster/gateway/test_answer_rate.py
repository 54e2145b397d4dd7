"""When a refused client should come back, from the rate at which a pool answers."""

from __future__ import annotations

import pytest

from sie.cluster.gateway.answer_rate import AnswerRate, retry_after_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def measured(per_s: float, seconds: float) -> tuple[AnswerRate, Clock]:
    clock = Clock()
    rate = AnswerRate(clock)
    for _ in range(int(per_s * seconds)):
        clock.now_s += 1 / per_s
        rate.count()
    return rate, clock


@pytest.mark.parametrize("per_s", [2.0, 50.0])
@pytest.mark.parametrize("seconds", [2.0, 60.0])
def test_a_steady_rate_is_found_from_the_first_seconds_on(per_s: float, seconds: float):
    rate, _ = measured(per_s, seconds)
    assert rate.per_s() == pytest.approx(per_s, rel=0.35)


def test_a_pool_that_stops_answering_is_slower_with_each_second():
    rate, clock = measured(100, 30)
    clock.now_s += 10
    assert 5 < rate.per_s() < 20
    clock.now_s += 50
    assert rate.per_s() < 0.01


@pytest.mark.parametrize(
    ("num_waiting", "per_s", "seconds"),
    [(0, 10.0, 1), (95, 10.0, 10), (100_000, 10.0, 60), (1, 1e-300, 60), (5, 0.0, 5)],
)
def test_a_client_comes_back_when_what_waits_is_answered(num_waiting: int, per_s: float, seconds: int):
    assert retry_after_s(num_waiting, per_s) == seconds
