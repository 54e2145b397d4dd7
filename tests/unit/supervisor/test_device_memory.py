"""Which models make room on a GPU; their loads and unloads are in test_loads.py."""

from __future__ import annotations

import pytest

from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.ipc.messages import ModelReport
from sie.supervisor.device_memory import DeviceMemories
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.evictions import Memory
from sie.supervisor.model_registry import ModelRegistry
from sie.values.card import ModelCard
from sie.values.generate import GenerateRule

GIB = 1 << 30
FULL = Memory(80 * GIB, 1 * GIB)


class Gpu:
    """One GPU with lazy models, and its worker's reports."""

    def __init__(self, device="cuda:0"):
        self.device = device
        self.memories = DeviceMemories(Models(), Generation(), [WorkerSlot(device)])
        self.registry = ModelRegistry(30.0)

    @property
    def records(self):
        return self.registry.records.values()

    def add(self, model, gib=0.0, *, kv_token_bytes=0):
        rule = GenerateRule(context_length=1 << 17, kv_token_bytes=kv_token_bytes) if kv_token_bytes else None
        card = ModelCard(id=model, kind="generator", num_weights=int(gib * GIB / 2), generate=rule)
        return self.registry.add(ModelSpec(id=model), False, card)

    def load(self, model, gib, *, device=None):
        self.registry.want(model, 0.0)
        for state in ("loading", "loaded"):
            report = ModelReport(model, state, device or self.device, memory_bytes=int(gib * GIB))
            self.registry.report(0, report, 0.0)


@pytest.mark.parametrize(("device", "victim"), [("cuda:0", None), ("cpu", "a")])
def test_the_only_model_of_a_gpu_is_not_unloaded_for_its_own_memory(device, victim):
    gpu = Gpu(device)
    gpu.add("a")
    gpu.load("a", 70)
    gpu.memories.report(0, FULL)
    assert gpu.memories.pressure_victim(0, gpu.records) == victim
    gpu.add("b")
    gpu.load("b", 1)
    assert gpu.memories.pressure_victim(0, gpu.records) == "a"


def test_a_model_that_runs_on_the_cpu_has_no_memory_of_the_gpu_to_give():
    gpu = Gpu()
    gpu.add("onnx")
    gpu.load("onnx", 1, device="cpu")
    gpu.memories.report(0, FULL)
    assert gpu.memories.pressure_victim(0, gpu.records) is None


def test_a_second_generating_model_needs_room_for_its_keys_and_values():
    gpu = Gpu()
    gpu.add("first", 16)
    gpu.load("first", 60)
    second = gpu.add("second", 8, kv_token_bytes=GIB // 1024)  # 8 GiB for a sequence of 8,192 tokens
    gpu.memories.report(0, Memory(80 * GIB, 20 * GIB))
    assert gpu.memories.plan_load(second, gpu.records).victims == {}
    gpu.memories.report(0, Memory(80 * GIB, 18 * GIB))
    assert gpu.memories.plan_load(second, gpu.records).victims == {"first": (0,)}
    gpu.registry.records["first"].is_pinned = True
    assert "needs about 16384 MiB on cuda:0" in gpu.memories.plan_load(second, gpu.records).refusal
