"""The benchmarks of a device, tried on a CPU: limits, idle time, and the figures of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import device, device_encoders, device_loads
from bench.device import Limits
from bench.device_idle import idle_between, idle_share
from bench.limits import Ceilings

CEILINGS = Ceilings({"bfloat16": {1: 1e12}}, {1: 1e10})


def test_idle_time_is_what_no_span_covers():
    assert idle_between([(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (5.0, 5.5), (9.0, 10.0)]) == pytest.approx(0.4)
    assert idle_between([(0.0, 10.0), (1.0, 2.0)]) == 0
    assert idle_between([]) is None


def test_the_operations_of_torch_are_the_activity_of_a_cpu():
    import torch

    numbers = torch.ones(300, 300)
    share = idle_share(lambda: [numbers @ numbers for _ in range(50)], "cpu")
    assert share is not None
    assert 0 <= share < 1
    assert idle_share(lambda: None, "cpu") is None


def test_a_limit_has_the_launch_that_comes_before_the_work():
    gpu = Limits(1e12, 1e10, CEILINGS._replace(launch_s=5e-6))
    assert gpu.floor_s(1e9, 1e6) == (pytest.approx(1.005e-3), "products")
    assert gpu.floor_s(1e6, 1e4) == (pytest.approx(6e-6), "launch")
    assert Limits(1e12, 1e10, CEILINGS).floor_s(1e6, 1e5) == (pytest.approx(1e-5), "memory")


def test_a_run_keeps_idle_time_mixed_texts_and_a_lone_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_encoders, "SHAPES", {"MiniLM-L6": device_encoders.SHAPES["MiniLM-L6"]})
    monkeypatch.setattr(device, "measure_ceilings", lambda *_: CEILINGS)
    monkeypatch.setattr(device_encoders, "measure_lone", lambda *_: {"p50_ms": 1.5, "requests": 7})
    arguments = ["--device", "cpu", "--quick", "--folder", str(tmp_path)]
    done = CliRunner().invoke(device_encoders.main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("*device-encoders.json")
    page: dict[str, Any] = json.loads(file.read_text())
    assert {row["length"] for row in page["full_steps"]} == {16, 64}
    assert all(0 <= row[key] <= 1 for row in page["full_steps"] for key in ("idle_share", "ahead_idle_share"))
    assert all(row["step_s"] > 0 and row["ahead_step_s"] > 0 for row in page["full_steps"])
    (mixed,) = page["mixed"]
    assert mixed["sentence_transformers_s"] > 0
    assert mixed["cosine"] > 0.99
    assert page["lone_over_http"] == {"p50_ms": 1.5, "requests": 7}
    assert "| p50_ms" in done.output


def test_a_library_that_is_not_installed_takes_no_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_loads, "find_spec", lambda _name: None)
    assert device_loads.sentence_transformers(None, [], "cpu") is None
