"""When requests are due, and the search for the highest rate that holds."""

from __future__ import annotations

import numpy as np
import pytest

from sie.loadgen.arrivals import best_trial, find_max_rate, plan_arrivals
from sie.loadgen.runs import Run


def test_constant_arrivals_are_evenly_apart():
    plan_ns = plan_arrivals(100, 2.0, poisson=False)
    assert len(plan_ns) == 200
    assert set(np.diff(plan_ns)) == {10_000_000}


def test_poisson_gaps_have_the_mean_and_spread_of_their_rate():
    gaps_ns = np.diff(plan_arrivals(1000, 20.0, poisson=True))
    assert gaps_ns.min() >= 0
    assert gaps_ns.mean() == pytest.approx(1e6, rel=0.03)
    assert gaps_ns.std() == pytest.approx(1e6, rel=0.05)


def run_of_a_server_that_holds(capacity: float, rate: float) -> Run:
    run = Run("")
    run.elapsed_s, run.num_good = 1.0, round(rate + 0.5)
    run.latencies.record(1_000_000 if rate <= capacity else 100_000_000)
    return run


@pytest.mark.parametrize("start", [10.0, 900.0, 50_000.0])
def test_the_search_ends_close_below_what_a_server_holds(start: float):
    trials = find_max_rate(lambda rate: run_of_a_server_that_holds(1000, rate), 20, start)
    best = best_trial(trials)
    assert best is not None
    assert 950 <= best.rate <= 1000


def test_a_server_that_holds_nothing_ends_the_search():
    assert best_trial(find_max_rate(lambda rate: run_of_a_server_that_holds(0, rate), 20, 100)) is None
