"""F12: a server with ten times the work it can do refuses most of it at once, and still does as much work as before."""

from __future__ import annotations

import time

import pytest

from tests.chaos.cluster import Leaks, cluster, rss_bytes
from tests.chaos.history import Ask, History, open_loop, quantile
from tests.chaos.ledger import SEED, Row, pick

TOKENS = 10
PER_TOKEN_US = 1000
"""A request of ten tokens takes 10 ms of its worker: two workers do 200 a second."""
PEAK_RATE = 2 * 1e6 / (TOKENS * PER_TOKEN_US)
RAMP_S = 1.0


def inner(history: History) -> list[Ask]:
    """Return the requests that were due while the load was steady."""
    first_s, last_s = history.asks[0].due_s + RAMP_S, history.asks[-1].due_s
    return [ask for ask in history.asks if first_s <= ask.due_s <= last_s]


def goodput(history: History) -> float:
    """Return the right answers a second while the load was steady."""
    first_s, last_s = history.asks[0].due_s + RAMP_S, history.asks[-1].due_s
    right = [ask for ask in history.asks if ask.outcome == "right" and first_s <= ask.ended_s <= last_s]
    return len(right) / (last_s - first_s)


@pytest.mark.row("F12", "ten times the work that the server can do")
@pytest.mark.timeout(300)
@pytest.mark.timing(alone=True, forks=True)
def test_f12_ten_times_overload_is_refused_quickly_and_costs_no_goodput(row: Row):
    flags = ("--max-queued-tokens", "200", "--max-step-tokens", "50", "--request-timeout-s", "5")
    load_s = pick(3.0, 20.0)
    points: list[tuple[float, float]] = []
    with cluster(*flags, stub=f"per_token_us={PER_TOKEN_US}") as server:
        leaks = Leaks(server)
        histories: dict[float, History] = {}
        for factor in pick((0.9, 10.0), (0.5, 0.9, 1.0, 2.0, 5.0, 10.0)):
            with open_loop(
                server, factor * PEAK_RATE, seed=SEED, max_items=1, num_chars=4 * TOKENS, timeout_s=5.0
            ) as load:
                time.sleep(RAMP_S + load_s)
            histories[factor] = load.history
            points.append((factor * PEAK_RATE, goodput(load.history)))
        memory = rss_bytes(server)
        leaks.check()
    row.plot("right answers a second, by requests a second", points, [], ("offered/s", "answered/s"))
    judge(row, histories)
    row.tell("largest frontend", memory["frontend"] / 2**20, "MiB")


def judge(row: Row, histories: dict[float, History]) -> None:
    peak = max(goodput(history) for history in histories.values())
    overload = inner(histories[10.0])
    refused = [ask for ask in overload if ask.outcome != "right"]
    assert {ask.outcome for ask in refused} == {"503 QUEUE_FULL"}
    waits_s = [ask.retry_after_s for ask in refused]
    took_s = sorted(ask.took_s for ask in refused)
    row.tell("offered", len(overload) / (overload[-1].due_s - overload[0].due_s), "/s")
    row.tell("peak goodput", peak, "/s")
    row.at_least("goodput at ten times", goodput(histories[10.0]) / peak, 0.9, "of the peak", slack=2.0)
    # A stall of half a second is a sixth of a short run.
    share = pick(0.5, 0.99)
    row.at_most("p99 (short run: median) of a refusal", quantile(took_s, share) * 1e3, 20.0, "ms", slack=20.0)
    row.tell("p99 of a refusal", quantile(took_s, 0.99) * 1e3, "ms")
    row.tell("median of a refusal", quantile(took_s, 0.5) * 1e3, "ms")
    row.at_least("shortest Retry-After", min(waits_s), 1, "s")
    row.at_most("longest Retry-After", max(waits_s), 60, "s", slack=1.0)
    row.at_most("p99 of what is accepted", quantile(histories[10.0].latencies_s(overload), 0.99), 2.0, "s")
