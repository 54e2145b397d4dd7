"""A worker's metrics about itself and its GPU. NVML is a fake module that can block, fail and recover."""

# ruff: noqa: N801  # the fake has pynvml's names
from __future__ import annotations

import math
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from sie.metrics import definitions
from sie.metrics.definitions import FAMILIES
from sie.shm.pages import CounterPage
from sie.values.fallbacks import MEANINGS, Fallback
from sie.workers.telemetry import GpuIdentity, GpuTelemetry, WorkerMetrics, gpu_identity, gpu_type

DEADLINE_S = 60.0
GIB = 1 << 30
UUID = "6a1c2f9e-0000-1111-2222-333344445555"
GPU = GpuIdentity(index=1, name="NVIDIA L4", uuid=UUID, pci_bus_id="00000000:3b:00.0", memory_total_bytes=24 * GIB)
SAMPLED_AT = 1_700_000_000.0


class FakeNvml:
    """The functions of `pynvml` that are used, over a table of devices keyed by what they are found by."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    class NVMLError_InvalidArgument(NVMLError):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_GpuIsLost(NVMLError):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    def __init__(self, **devices):
        self.devices = {f"GPU-{UUID}": "gpu"} if not devices else devices["devices"]
        self.unknown_uuid = self.NVMLError_NotFound
        self.init_error = None
        self.failing = {}
        self.unblocked = threading.Event()
        self.unblocked.set()

    def _call(self, name, handle=None):
        self.unblocked.wait(DEADLINE_S)
        error = self.failing.get(name)
        if error is not None:
            raise error

    def nvmlInit(self):
        if self.init_error is not None:
            raise self.init_error

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.devices:
            raise self.unknown_uuid(uuid)
        return self.devices[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        return self.nvmlDeviceGetHandleByUUID(bus_id)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return f"parent of {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._call("memory")
        return SimpleNamespace(used=3 * GIB, total=24 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._call("utilization")
        if handle.startswith("mig"):
            raise self.NVMLError_NotSupported
        return SimpleNamespace(gpu=77, memory=1)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        self._call("temperature")
        return {"gpu": 55, "parent of mig": 66}[handle]


@pytest.fixture
def page():
    page = CounterPage.create(64 * 1024)
    yield page
    page.close()


@pytest.fixture
def start(page):
    """Start telemetry with a fake NVML; stopped again before the page goes."""
    running = []

    def begin(nvml, gpu=GPU):
        telemetry = GpuTelemetry(page, gpu, nvml=nvml, interval_s=0.005, wall_clock=lambda: SAMPLED_AT)
        running.append((telemetry, nvml))
        assert telemetry.start()
        return telemetry

    yield begin
    for telemetry, nvml in running:
        nvml.unblocked.set()
        assert telemetry.stop(DEADLINE_S)


def gauges(page):
    return {record.name.removeprefix("sie_gpu_"): record.value for record in page.records()}


def wait_until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "not within the deadline"
        time.sleep(0.001)


def test_a_sample_publishes_every_value_with_the_device_named(page, start):
    start(FakeNvml())
    wait_until(lambda: gauges(page)["sample_timestamp_seconds"])
    assert gauges(page) == {
        "utilization_percent": 77, "memory_used_bytes": 3 * GIB, "memory_total_bytes": 24 * GIB,
        "temperature_celsius": 55, "up": 1, "sample_timestamp_seconds": SAMPLED_AT,
    }  # fmt: skip
    expected = (("device", "cuda:1"), ("index", "1"), ("name", "NVIDIA L4"), ("gpu_type", "l4"), ("uuid", UUID))
    assert {record.labels for record in page.records()} == {expected}


def test_the_device_is_listed_before_its_first_sample(page):
    GpuTelemetry(page, GPU)
    found = gauges(page)
    assert (found["up"], found["memory_total_bytes"], found["sample_timestamp_seconds"]) == (1, 24 * GIB, 0)
    assert math.isnan(found["memory_used_bytes"])


def test_a_device_without_uuid_is_found_by_its_bus_id(page, start):
    gpu = GpuIdentity(index=0, name="x", uuid="", pci_bus_id=GPU.pci_bus_id, memory_total_bytes=1)
    start(FakeNvml(devices={GPU.pci_bus_id: "gpu"}), gpu)
    wait_until(lambda: gauges(page)["utilization_percent"] == 77)


@pytest.mark.parametrize("error", ["NVMLError_NotFound", "NVMLError_InvalidArgument"])
def test_a_mig_slice_has_memory_no_utilisation_and_its_parents_temperature(page, start, error):
    nvml = FakeNvml(devices={f"MIG-{UUID}": "mig"})
    nvml.unknown_uuid = getattr(nvml, error)
    start(nvml)
    wait_until(lambda: gauges(page)["sample_timestamp_seconds"])
    found = gauges(page)
    assert math.isnan(found["utilization_percent"])
    assert (found["memory_used_bytes"], found["temperature_celsius"], found["up"]) == (3 * GIB, 66, 1)


def test_unified_memory_leaves_the_device_up(page, start):
    nvml = FakeNvml()
    nvml.failing["memory"] = nvml.NVMLError_NotSupported()
    start(nvml)
    wait_until(lambda: gauges(page)["sample_timestamp_seconds"])
    found = gauges(page)
    assert math.isnan(found["memory_used_bytes"])
    assert (found["up"], found["memory_total_bytes"], found["utilization_percent"]) == (1, 24 * GIB, 77)


def test_a_lost_device_is_down_and_comes_back(page, start):
    nvml = FakeNvml()
    start(nvml)
    wait_until(lambda: gauges(page)["sample_timestamp_seconds"])
    nvml.failing["memory"] = nvml.NVMLError_GpuIsLost()
    wait_until(lambda: gauges(page)["up"] == 0)
    assert math.isnan(gauges(page)["utilization_percent"])
    assert gauges(page)["sample_timestamp_seconds"] == SAMPLED_AT
    nvml.failing.clear()
    wait_until(lambda: gauges(page)["up"] == 1)
    wait_until(lambda: gauges(page)["utilization_percent"] == 77)


def test_a_blocked_call_leaves_the_sample_old_and_blocks_nobody(page):
    nvml = FakeNvml()
    nvml.unblocked.clear()
    telemetry = GpuTelemetry(page, GPU, nvml=nvml, interval_s=0.005)
    assert telemetry.start()
    assert not telemetry.stop(0.05)
    assert gauges(page)["sample_timestamp_seconds"] == 0, "nobody waited for the call, which would have ended"
    nvml.unblocked.set()
    assert telemetry.stop(DEADLINE_S)


@pytest.mark.parametrize("error", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"])
def test_without_a_driver_the_thread_ends_by_itself(page, start, error):
    nvml = FakeNvml()
    nvml.init_error = getattr(nvml, error)()
    telemetry = start(nvml)
    wait_until(lambda: not telemetry.is_sampling)
    assert gauges(page)["sample_timestamp_seconds"] == 0


def test_without_the_module_there_is_no_thread(page, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    telemetry = GpuTelemetry(page, GPU)
    assert not telemetry.start()
    assert not telemetry.is_sampling


@pytest.mark.parametrize(
    ("name", "memory_gib", "expected"),
    [
        ("NVIDIA L4", 23, "l4"),
        ("NVIDIA L40S", 45, "l40s"),
        ("Tesla T4", 15, "t4"),
        ("NVIDIA A10G", 23, "a10g"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 40, "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 10, "a100-80gb"),
        ("GRID A100", 79, "a100-80gb"),
        ("GRID A100", 39, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 80, "h100"),
        ("NVIDIA H200", 141, "h200"),
        ("NVIDIA GH200 480GB", 96, "gh200"),
        ("NVIDIA GeForce RTX 4090", 24, "unknown"),
        ("", 0, "unknown"),
    ],
)
def test_gpu_type_is_the_machine_profile_word(name, memory_gib, expected):
    assert gpu_type(name, memory_gib * GIB) == expected


def test_identity_comes_from_what_cuda_tells():
    properties = SimpleNamespace(
        name="NVIDIA H100", total_memory=80 * GIB, uuid=f"GPU-{UUID}", pci_bus_id=59, pci_device_id=0, pci_domain_id=0
    )
    assert gpu_identity(2, properties) == GpuIdentity(
        index=2, name="NVIDIA H100", uuid=UUID, pci_bus_id="00000000:3b:00.0", memory_total_bytes=80 * GIB
    )


def test_identity_without_uuid_and_bus_is_empty_there():
    identity = gpu_identity(0, SimpleNamespace(name="old", total_memory=1))
    assert (identity.uuid, identity.pci_bus_id) == ("", "")


def test_worker_counters_use_the_defined_families(page):
    metrics = WorkerMetrics(page, "3")
    metrics.observe_step(0.004, 100)
    metrics.observe_batch("m", 6, 90, 0.003)
    metrics.observe_batch("m", 2, 10, 0.001)
    metrics.set_queue_depths({"m": "12345"})
    metrics.set_model("m", "cpu", loaded=True, memory_bytes=1024)
    metrics.set_extents_in_use(7)
    by_name = {record.name: record for record in page.records()}
    defined = {family.name: family for family in FAMILIES}
    for name, record in by_name.items():
        assert tuple(label for label, _ in record.labels) == defined[name].labels
        assert record.bounds == defined[name].bounds
    values = {name: (dict(record.labels), record.value) for name, record in by_name.items()}
    assert values == {
        definitions.STEP_DURATION.name: ({"worker": "3"}, 0.004),
        definitions.MODEL_BUSY.name: ({"model": "m"}, 0.004),
        definitions.STEP_TOKENS.name: ({"worker": "3"}, 100),
        definitions.BATCH_SIZE.name: ({"model": "m"}, 8),
        definitions.TOKENS_PROCESSED.name: ({"model": "m"}, 100),
        definitions.QUEUE_DEPTH.name: ({"model": "m"}, 5),
        definitions.MODEL_LOADED.name: ({"model": "m", "device": "cpu"}, 1),
        definitions.MODEL_MEMORY.name: ({"model": "m", "device": "cpu"}, 1024),
        definitions.EXTENTS_IN_USE.name: ({"segment": "reply"}, 7),
        definitions.MODEL_FALLBACK.name: ({"model": "m", "device": "cpu", "fallback": [*MEANINGS][-1]}, 0),
        **{name: ({"model": "m"}, 0) for name in defined if name.startswith("sie_oom_") and "evictions" not in name},
    }
    assert sum(by_name[definitions.BATCH_SIZE.name].buckets) == 2


def test_an_unloaded_model_is_published_as_zero(page):
    metrics = WorkerMetrics(page, "0")
    metrics.set_model("m", "cpu", loaded=True, memory_bytes=1024)
    metrics.set_model("m", "cpu", loaded=False, memory_bytes=0)
    loaded = [record.value for record in page.records() if record.name == definitions.MODEL_LOADED.name]
    assert loaded == [0]


def test_the_fallbacks_of_a_model_are_published_until_it_is_unloaded(page):
    def shown() -> set[str]:
        own = [record for record in page.records() if record.name == definitions.MODEL_FALLBACK.name]
        assert {dict(record.labels)["fallback"] for record in own} == set(MEANINGS)
        return {dict(record.labels)["fallback"] for record in own if record.value}

    metrics = WorkerMetrics(page, "0")
    fallbacks = (Fallback("no_graphs", "it waits"), Fallback("no_kernels", "no compiler"))
    metrics.set_model("m", "cuda:0", loaded=True, memory_bytes=1, fallbacks=fallbacks)
    assert shown() == {"no_graphs", "no_kernels"}
    metrics.set_model("m", "cuda:0", loaded=False, memory_bytes=0)
    assert shown() == set()


def test_a_share_of_values_that_are_not_finite_grows_and_is_forgotten_when_the_model_is_well_again(page):
    def share() -> float:
        return next(record.value for record in page.records() if record.name == definitions.NON_FINITE_SHARE.name)

    metrics = WorkerMetrics(page, "0")
    metrics.count_non_finite("m", 1)
    assert 0 < share() <= 0.01, "one says little"
    for _ in range(2000):
        metrics.count_non_finite("m", 1)
        metrics.observe_batch("m", 50, 100, 0.1)
    assert 0.015 < share() < 0.025, "one in fifty"
    metrics.observe_batch("m", 1000, 1000, 0.1)
    assert share() < 0.01
    metrics.observe_batch("m", 10_000, 1000, 0.1)
    assert share() < 1e-4
