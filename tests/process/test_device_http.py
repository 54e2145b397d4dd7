"""The benchmark's lone client, with a real server on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import device_http
from bench.device import Limits, Session
from bench.limits import Ceilings

SESSION = Session({}, Limits(1.0, 1.0, Ceilings({}, {})), "cpu", is_quick=True)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def test_a_lone_client_is_measured():
    found = device_http.measure_lone(SESSION, SIZES)
    assert found["requests"] > 0, found
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]


def test_a_server_that_does_not_start_is_said_and_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(device_http, "_write", lambda *_: tmp_path / "absent")
    assert str(tmp_path / "absent") in device_http.measure_lone(SESSION, SIZES)["absent"]
