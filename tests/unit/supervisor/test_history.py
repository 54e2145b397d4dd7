"""The load of the last hour: rates between two points, and memory that does not grow."""

from __future__ import annotations

import pytest

from sie.ipc.messages import HISTORY_POINTS
from sie.metrics import definitions as d
from sie.shm.pages import CounterPage
from sie.supervisor.history import STEP_S, LoadHistory, quantile


@pytest.fixture
def page():
    made = CounterPage.create(1 << 16)
    yield made
    made.close()


def test_point_has_the_rates_since_the_one_before(page):
    history = LoadHistory()
    requests = page.counter(d.REQUESTS.name, d.REQUESTS.label_pairs("m", "encode", "success"))
    tokens = page.counter(d.GENERATED_TOKENS.name, d.GENERATED_TOKENS.label_pairs("g"))
    latency, texts = (
        page.histogram(d.REQUEST_DURATION.name, d.REQUEST_DURATION.label_pairs("m", endpoint, "total"), d.REQUEST_DURATION.bounds)
        for endpoint in ("encode", "generate")
    )  # fmt: skip
    requests.add(1000)  # before the first look: not in any rate
    assert history.tick(100.0, [page]) is None
    requests.add(30)
    tokens.add(60)
    page.gauge(d.QUEUE_DEPTH.name, d.QUEUE_DEPTH.label_pairs("m")).set(7)
    for _ in range(10):
        latency.observe(0.02)
        texts.observe(20.0)  # as long as its text: not a latency of the others
    assert history.tick(100.0 + STEP_S - 0.1, [page]) is None
    point = history.tick(100.0 + STEP_S, [page])
    assert point is not None
    assert (point.requests_per_s, point.generated_per_s, point.queued) == (2.0, 4.0, 7.0)
    assert 0.01 <= point.p50_s <= point.p95_s <= 0.025
    quiet = history.tick(100.0 + 2 * STEP_S, [page])
    assert (quiet.requests_per_s, quiet.p50_s) == (0.0, None)
    assert history.points == (point, quiet)


def test_an_hour_is_kept_and_no_more(page):
    history = LoadHistory()
    for step in range(3 * HISTORY_POINTS):
        history.tick(step * STEP_S, [page])
    assert len(history.points) == HISTORY_POINTS == 3600 / STEP_S


def test_a_late_tick_averages_over_the_time_that_passed(page):
    history = LoadHistory()
    requests = page.counter(d.REQUESTS.name, d.REQUESTS.label_pairs("m", "encode", "success"))
    history.tick(0.0, [page])
    requests.add(600)
    assert history.tick(600.0, [page]).requests_per_s == 1.0


def test_a_broken_page_costs_a_point_and_not_the_server(page):
    history = LoadHistory()
    page.histogram(d.REQUEST_DURATION.name, (("phase", "total"),), (1.0,)).observe(0.5)
    page.gauge(d.QUEUE_DEPTH.name, d.QUEUE_DEPTH.label_pairs("m")).set(float("nan"))
    assert history.tick(0.0, [page]) is None
    assert history.tick(STEP_S, [page]) is None


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [([0, 0, 0], 0.5, None), ([10, 0, 0], 0.5, 0.5), ([0, 10, 0], 0.5, 1.5), ([0, 0, 5], 0.5, 2.0), ([5, 5, 0], 0.95, 1.9)],
)  # fmt: skip
def test_quantile_is_linear_within_a_bucket(counts, share, wanted):
    assert quantile(counts, (1.0, 2.0), share) == pytest.approx(wanted)
