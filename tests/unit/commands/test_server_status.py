"""The figures of `sie ps` and `sie top`: rates, shares and quantiles between two frames."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sie.commands.running import _render
from sie.commands.server_status import (
    Frame,
    Window,
    problems,
    read_frame,
    shown_bytes,
    shown_duration,
    shown_rate,
    shown_uptime,
)


def frame(timestamp: float, *, pid: int = 7, counts: tuple[float, ...] = (0, 0, 0), **fields: Any) -> Frame:
    """Return a frame with one model, one worker and one histogram; fields replace its own."""
    worker = {
        "slot": 0,
        "device": "cpu",
        "state": "ready",
        "restarts": 0,
        "busy_seconds": 0,
        "num_steps": 0,
        "num_tokens": 0,
    }
    body = {
        "timestamp": timestamp, "ready": True, "name": "host",
        "server": {"version": "1", "uptime_seconds": 1, "pid": pid},
        "workers": [{**worker, **fields.pop("worker", {})}],
        "histograms": {"h": {"m": {"buckets": [1.0, 2.0, 4.0], "counts": counts}}},
        **fields,
    }  # fmt: skip
    return read_frame(msgspec.json.encode(body))


def test_rates_are_growth_over_the_servers_own_time():
    older = frame(10, counters={"c": {"m": 5, "n": 1}}, worker={"busy_seconds": 1, "num_tokens": 100})
    latest = frame(14, counters={"c": {"m": 25, "n": 1}}, worker={"busy_seconds": 3, "num_tokens": 900})
    window = Window(older, latest)
    assert (window.rate("c"), window.rate("c", "m"), window.rate("c", "n"), window.rate("none")) == (5, 5, 0, 0)
    assert window.busy_share(latest.workers[0]) == 0.5
    assert window.token_rate(latest.workers[0]) == 200


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["m/versions/1", "n/versions/2"], ["m", "n"]),
        (["m/versions/1", "m/versions/2"], ["m/versions/1", "m/versions/2"]),
        (["refused/versions"], ["refused"]),
        (["org/m", "org/versions/x"], ["org/m", "org/versions/x"]),
    ],
)
def test_a_version_is_shown_only_where_there_are_several(names: list[str], shown: list[str]):
    latest = frame(1, models=[{"name": name, "state": "failed", "error": "no such file"} for name in names])
    lines = _render(latest, "http://h").splitlines()
    assert [line.split()[0] for line in lines[-len(names) :]] == shown
    assert problems(latest) == [f"{name}: no such file" for name in shown]


def test_a_reason_is_shown_once():
    model = {"name": "m", "state": "failed", "error": "no such file"}
    shown = _render(frame(1, models=[model], ready=False, reason="not loaded: m (failed: no such file)"), "http://h")
    assert shown.count("no such file") == 1


def test_a_terminal_gets_no_escape_sequences_of_a_server():
    model = {"name": "m", "state": "failed", "error": "bad\x1b]0;title\x07\x9b2J\r"}
    shown = _render(frame(1, models=[model]), "http://h")
    assert "m: bad\ufffd]0;title\ufffd\ufffd2J\n" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)


def test_no_figure_spans_a_restart_and_none_comes_from_a_single_frame():
    latest = frame(14, pid=8, counters={"c": {"m": 25}}, counts=(1, 2, 3))
    for older in (None, frame(10), frame(14, pid=8)):
        window = Window(older, latest)
        assert (window.rate("c"), window.quantile_s("h", 0.5), window.busy_share(latest.workers[0])) == (None,) * 3
    restarted = frame(12, worker={"restarts": 1, "busy_seconds": 0.1})
    assert Window(frame(10, worker={"busy_seconds": 9}), restarted).busy_share(restarted.workers[0]) is None


@pytest.mark.parametrize(
    ("before", "after", "share", "expected"),
    [
        ((0, 0, 0), (4, 4, 4), 0.5, 0.5),  # half of the first bucket, which begins at 0
        ((4, 4, 4), (4, 8, 8), 0.5, 1.5),
        ((0, 0, 0), (1, 2, 4), 1.0, 4.0),
        ((3, 3, 3), (3, 3, 3), 0.5, None),
    ],
)
def test_quantiles_are_linear_inside_a_bucket(before, after, share, expected):
    window = Window(frame(1, counts=before), frame(2, counts=after))
    assert window.quantile_s("h", share) == expected
    assert window.quantile_s("h", share, "m") == expected
    assert window.quantile_s("h", share, "other") is None


def test_problems_begin_with_what_stops_the_server():
    model = {"name": "m", "state": "failed", "error": "no file"}
    shown = problems(frame(1, ready=False, reason="models load", models=[model], keys_error="keys: bad"))
    assert shown == ["not ready: models load", "API keys not reloaded: keys: bad", "m: no file"]
    assert problems(frame(1)) == []


def test_a_refused_change_is_said_to_be_one():
    shown = problems(frame(1, config_error="sie.toml: unknown key", tls_error="tls_cert: not PEM"))
    assert shown == ["settings not reloaded: sie.toml: unknown key", "certificate not renewed: tls_cert: not PEM"]


def test_values_are_short():
    assert [shown_bytes(count) for count in (None, 0, 512, 90 << 20, 3 << 30)] == [
        "-",
        "-",
        "512 B",
        "90.0 MiB",
        "3.0 GiB",
    ]
    assert [shown_rate(rate) for rate in (None, 0.0, 2.25, 123.4, 12_345.0)] == ["-", "0", "2.2", "123", "12.3k"]
    assert [shown_duration(time_s) for time_s in (None, 0.0123, 2.5)] == ["-", "12.3 ms", "2.5 s"]
    assert [shown_uptime(time_s) for time_s in (0, 59, 3_700, 200_000)] == ["0 s", "59 s", "1 h 1 min", "2 d 7 h"]
