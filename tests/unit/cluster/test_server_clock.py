"""The server's clock as a process sees it: skew, drift and a new leader."""

from __future__ import annotations

import pytest

from sie.cluster.server_clock import ServerClock, parse_stamp

HOUR_NS = 3_600_000_000_000


def test_times_are_translated_both_ways_whatever_the_skew():
    for skew_ns in (-9 * HOUR_NS, 0, 9 * HOUR_NS):
        clock = ServerClock(lambda: 1000)
        clock.measure(900, 1000, 950 + skew_ns)
        assert clock.to_server(2000) == 2000 + skew_ns
        assert clock.to_local(clock.to_server(2000)) == 2000
        assert clock.left_ns(clock.to_server(1500)) == 500


def test_a_slow_measurement_does_not_replace_a_quick_one():
    clock = ServerClock(lambda: 0)
    clock.measure(0, 100, 50)
    clock.measure(1000, 9000, 1000)
    assert clock.to_server(0) == 0


def test_a_slow_measurement_that_contradicts_a_quick_one_replaces_it():
    clock = ServerClock(lambda: 0)
    clock.measure(0, 100, 50)
    clock.measure(1000, 9000, 5000 + HOUR_NS)
    assert clock.to_server(0) == HOUR_NS


def test_after_a_new_leader_any_measurement_counts():
    clock = ServerClock(lambda: 0)
    clock.measure(0, 100, 50)
    clock.forget()
    clock.measure(1000, 9000, 1000)
    assert clock.to_server(5000) == 1000


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [("1970-01-01T00:00:01Z", 1_000_000_000), ("1970-01-01T00:00:01.000000002Z", 1_000_000_002),
     ("1970-01-01T01:00:00.5+01:00", 500_000_000)],
)  # fmt: skip
def test_a_stamp_of_the_api_keeps_its_nanoseconds(text: str, nanoseconds: int):
    assert parse_stamp(text) == nanoseconds


@pytest.mark.parametrize("text", ["", "yesterday", "1970-01-01", "1970-01-01T00:00:01"])
def test_what_is_no_stamp_is_refused(text: str):
    with pytest.raises(ValueError, match="not a time"):
        parse_stamp(text)
