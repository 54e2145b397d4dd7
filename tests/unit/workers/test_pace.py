from __future__ import annotations

from sie.workers.pace import Pace


def test_a_models_own_pace_decides_what_its_steps_are_allowed():
    paces: dict[str, float] = {}
    pace = Pace(paces)
    unknown = pace.allowed_ns("slow", 1)
    for _ in range(200):
        pace.learn("slow", 1, 10_000_000_000)
        pace.learn("fast", 1000, 1_000_000)
    assert pace.allowed_ns("slow", 1) > 50_000_000_000 > unknown
    assert pace.allowed_ns("fast", 1) < 1_100_000_000
    assert abs(paces["fast"] - 1000) < 1


def test_a_step_without_tokens_says_nothing():
    paces: dict[str, float] = {}
    Pace(paces).learn("m", 0, 1000)
    assert paces == {}
