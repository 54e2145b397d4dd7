"""Memory that grows with requests is seen, and named by its process; `make soak` looks for an hour."""

from __future__ import annotations

import pytest

from tests.chaos.ledger import SEED, pick
from tests.chaos.soak import MAX_SLOPE, Sample, judge, soak

MIB = 1 << 20


@pytest.mark.parametrize(("bytes_each", "grows"), [(0, False), (50, False), (210, True)])
def test_the_line_through_the_samples_is_what_a_request_leaves_behind(bytes_each, grows):
    warm_up = [Sample(n * 100, n * MIB) for n in range(20)]
    steady = [Sample(n * 100, 20 * MIB + n * 100 * bytes_each + (n % 3) * 10_000) for n in range(20, 200)]
    growth = judge("worker 1", warm_up + steady)
    assert (growth.slope > MAX_SLOPE) is grows
    assert growth.slope == pytest.approx(bytes_each * 10_000 / MIB, abs=0.05)


@pytest.mark.timing(alone=True)
def test_a_leak_on_purpose_is_caught():
    """8 KiB a request are 78 MiB for 10,000; a warm-up of a few seconds alone may look like 10."""
    growth = soak(pick(6.0, 20.0), leak_kib=8, seed=SEED, is_real=False).growth()
    slopes = {role: sum(each.slope for each in growth if each.process.startswith(role))
              for role in ("supervisor", "frontend", "worker")}  # fmt: skip
    assert slopes["supervisor"] <= pick(10.0, MAX_SLOPE)  # a few pages are much for the requests of a few seconds
    assert min(slopes["frontend"], slopes["worker"]) > 40, growth
