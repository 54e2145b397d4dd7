from __future__ import annotations

import pytest

from sie.workers.scheduling.pace import Pace

TARGET_NS = 50_000_000


def test_a_models_own_pace_decides_what_its_steps_are_allowed():
    pace = Pace({})
    unknown = pace.allowed_ns("slow", 1)
    for _ in range(200):
        pace.record("slow", 1, 10_000_000_000)
        pace.record("fast", 1000, 1_000_000)
    assert pace.allowed_ns("slow", 1) > 50_000_000_000 > unknown
    assert pace.allowed_ns("fast", 1) < 1_100_000_000
    assert pace.allowed_ns("fast", 1_000_000) - pace.allowed_ns("fast", 0) == pytest.approx(10_000_000_000, rel=1e-3)


def test_a_step_without_tokens_or_time_says_nothing():
    sizes: dict[str, float] = {}
    pace = Pace(sizes, 1)
    unknown = pace.allowed_ns("m", 1)
    pace.record("m", 0, 1000)
    pace.adapt("m", 0, 1000)
    pace.adapt("m", 10, 0)
    assert sizes == {}
    assert pace.allowed_ns("m", 1) == unknown


def _run(pace: Pace, sizes: dict[str, float], num_steps: int, *, base_ns: int, token_ns: int) -> int:
    """Run full steps of at most 1,000 tokens and return how long the last one took."""
    took_ns = 0
    for _ in range(num_steps):
        num_tokens = int(min(1000, sizes.get("m", 1000)))
        took_ns = base_ns + num_tokens * token_ns
        pace.adapt("m", num_tokens, took_ns)
    return took_ns


@pytest.mark.parametrize(("base_ns", "token_ns"), [(0, 400_000), (5_000_000, 400_000), (40_000_000, 1_000_000)])
def test_steps_that_take_too_long_become_smaller_until_they_do_not(base_ns, token_ns):
    sizes: dict[str, float] = {}
    took_ns = _run(Pace(sizes, TARGET_NS), sizes, 40, base_ns=base_ns, token_ns=token_ns)
    assert 0.5 * TARGET_NS < took_ns < 1.2 * TARGET_NS


def test_one_slow_step_is_soon_forgotten():
    sizes: dict[str, float] = {}
    pace = Pace(sizes, TARGET_NS)
    pace.adapt("m", 1000, 20 * TARGET_NS)
    assert sizes["m"] == 500
    _run(pace, sizes, 3, base_ns=0, token_ns=20_000)
    assert sizes["m"] >= 1000


def test_short_steps_that_cost_much_for_each_token_bound_nothing():
    sizes: dict[str, float] = {}
    pace = Pace(sizes, TARGET_NS)
    for _ in range(100):
        pace.adapt("m", 12, TARGET_NS // 10)
    assert sizes == {}


def test_a_small_step_says_nothing_against_a_limit():
    sizes: dict[str, float] = {"m": 400.0}
    Pace(sizes, TARGET_NS).adapt("m", 10, 1000)
    assert sizes["m"] == 400


def test_a_step_of_one_token_is_always_possible():
    sizes: dict[str, float] = {}
    pace = Pace(sizes, TARGET_NS)
    for _ in range(20):
        pace.adapt("m", 1, 100 * TARGET_NS)
    assert sizes["m"] == 1


def test_without_a_target_no_step_is_bounded():
    sizes: dict[str, float] = {}
    Pace(sizes).adapt("m", 1000, 10**12)
    assert sizes == {}
