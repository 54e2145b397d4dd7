"""The distribution of durations: right to a tenth of a percent, whatever it is made of."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sie.loadgen.histogram import Histogram

PERCENTILES = (0.1, 10, 50, 90, 99, 99.9, 99.99, 100)


def filled(durations: np.ndarray) -> Histogram:
    histogram = Histogram()
    for duration in durations.tolist():
        histogram.record(duration)
    return histogram


@pytest.mark.parametrize("sigma", [0.1, 1.0, 4.0])
def test_percentiles_are_those_of_the_sorted_list(sigma: float):
    durations = np.random.default_rng(1).lognormal(13, sigma, 200_000).astype(np.int64)
    ranks = [math.ceil(percentile / 100 * len(durations) - 1e-9) for percentile in PERCENTILES]
    expected = np.sort(durations)[[rank - 1 for rank in ranks]] / 1e6
    np.testing.assert_allclose(filled(durations).percentiles_ms(PERCENTILES), expected, rtol=1e-3, atol=1e-6)


def test_small_numbers_are_exact():
    assert filled(np.arange(1, 1001)).percentiles_ms([50, 99, 100]) == [500e-6, 990e-6, 1000e-6]


def test_the_longest_is_exact():
    assert filled(np.array([5, 123_456_789_123])).max_ns == 123_456_789_123


def test_counts_within_a_limit():
    histogram = filled(np.array([1_000_000, 2_000_000, 9_000_000]))
    assert [histogram.count_within(limit) for limit in (900_000, 1_000_000, 5_000_000, 9_000_000)] == [0, 1, 2, 3]


def test_beyond_its_range_it_counts_what_it_can():
    histogram = filled(np.array([-5, 1 << 60]))
    assert histogram.count == 2
    assert histogram.percentiles_ms([1])[0] == 0
    assert histogram.max_ns == 1 << 60


def test_nothing_recorded_has_no_percentiles():
    assert all(map(math.isnan, Histogram().percentiles_ms(PERCENTILES)))
    assert Histogram().max_ns == 0
