"""What a worker's process does beside its loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sie.values.card import ModelCard
from sie.workers import main


@pytest.mark.parametrize(("device", "selected"), [("cpu:1", []), ("cuda", [0]), ("cuda:3", [3])])
def test_the_thread_that_runs_steps_selects_the_worker_s_gpu_with_the_first_model(
    device: str, selected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    telemetry = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: index)
    monkeypatch.setattr(main, "gpu_identity", lambda _index, _properties: None)
    monkeypatch.setattr(main, "GpuTelemetry", lambda _counters, _identity: telemetry)
    launch: Any = SimpleNamespace(device=device)
    start = main._gpu_starter(launch, None)  # type: ignore[arg-type]
    start(ModelCard(id="stub", kind="stub"))
    assert found == []
    for model in ("one", "two"):
        start(ModelCard(id=model, kind="encoder", dims={"dense": 4}))
    assert found == selected
