"""The simulation of waiting texts obeys what holds for every queue."""

from __future__ import annotations

import pytest

from bench.queueing import COSTS, ORDERS, Order, simulate_closed, simulate_open

COST = COSTS["bert-base"]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name)
def test_texts_of_one_length_wait_for_the_connections_divided_by_the_rate(order: Order):
    """Little's law, which no order can change."""
    one = simulate_closed(order, COST, [20], 32, 10)
    assert one.p50_ms / 1000 * one.tokens_per_s / 20 == pytest.approx(32, rel=0.1)


def test_the_same_run_gives_the_same_figures():
    assert simulate_open(ORDERS[0], COST, [12, 230], 0.8, 5) == simulate_open(ORDERS[0], COST, [12, 230], 0.8, 5)


def test_a_queue_below_the_workers_rate_answers_everything_that_arrives():
    one = simulate_open(ORDERS[0], COST, [12], 0.5, 10)
    rate = 0.5 * sum(COST.speeds) / COST.token_ms * 1000
    assert one.tokens_per_s == pytest.approx(rate, rel=0.1)
