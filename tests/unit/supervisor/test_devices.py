from __future__ import annotations

import subprocess

import pytest

from sie.supervisor import devices
from sie.supervisor.devices import WorkerSlot, resolve_devices
from sie.supervisor.host_resources import StartError


@pytest.fixture
def machine(monkeypatch):
    """Return what sets the number of cores and GPUs of this machine."""

    def make(num_cores: int, num_gpus: int | None = None, free_bytes: int = 1 << 40):
        def count_gpus(_timeout_s):
            assert num_gpus is not None, "nothing here needs to know about GPUs"
            return num_gpus

        monkeypatch.setattr(devices, "read_memory", lambda: (1 << 41, free_bytes))
        monkeypatch.setattr(devices, "usable_cores", lambda: list(range(num_cores)))
        monkeypatch.setattr(devices, "_count_gpus", count_gpus)
        monkeypatch.setattr(devices, "read_places", lambda _cores: {})
        monkeypatch.setattr(devices, "find_near_cores", lambda *_: [])

    return make


@pytest.mark.parametrize(
    ("setting", "slots"),
    [
        ("cpu", [("cpu", (0,)), ("cpu", (1,)), ("cpu", (2,)), ("cpu", (3,))]),
        ("cpu:1", [("cpu", (0, 1, 2, 3))]),
        ("cpu:2", [("cpu", (0, 1)), ("cpu", (2, 3))]),
    ],
)
def test_cpu_workers_share_the_cores_and_no_gpu_is_looked_for(machine, setting, slots):
    machine(4)
    assert resolve_devices(setting, 1.0) == [WorkerSlot(*slot) for slot in slots]


@pytest.mark.parametrize(
    ("setting", "num_gpus", "names"),
    [
        ("auto", 0, ["cpu"] * 4),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 2, ["cuda:0", "cuda:1"]),
        ("cuda:1", 2, ["cuda:1"]),
        ("cuda:1,cuda:0", 2, ["cuda:1", "cuda:0"]),
    ],
)
def test_gpus_get_a_worker_each(machine, setting, num_gpus, names):
    machine(4, num_gpus)
    slots = resolve_devices(setting, 1.0)
    assert [slot.device for slot in slots] == names
    assert sorted(core for slot in slots for core in slot.cores) == [0, 1, 2, 3]


def test_gpus_get_the_cores_near_them(machine, monkeypatch):
    machine(4, 2)
    asked = []
    monkeypatch.setattr(devices, "find_near_cores", lambda *args: asked.append(args) or [{2, 3}, {0, 1}])
    assert resolve_devices("cuda:1,cuda:0", 1.0) == [WorkerSlot("cuda:1", (2, 3)), WorkerSlot("cuda:0", (0, 1))]
    assert resolve_devices("cuda:0", 1.0) == [WorkerSlot("cuda:0", (0, 1, 2, 3))]
    assert asked == [([1, 0], 1.0)]


@pytest.mark.parametrize(
    ("free_gib", "shares"),
    [
        (1, [(0, 1, 2, 3)]),
        (7, [(0, 1, 2, 3)]),
        (8, [(0, 1), (2, 3)]),
        (15, [(0, 1), (2,), (3,)]),
        (16, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_with_little_memory_fewer_workers_share_the_cores(machine, free_gib, shares):
    machine(4, free_bytes=free_gib << 30)
    assert [slot.cores for slot in resolve_devices("cpu", 1.0)] == shares


def test_where_memory_is_not_known_each_core_has_a_worker(machine, monkeypatch):
    machine(3)
    monkeypatch.setattr(devices, "read_memory", lambda: None)
    assert len(resolve_devices("cpu", 1.0)) == 3


@pytest.mark.parametrize(
    "setting", ["", "gpu", "cpu:0", "cpu:x", "cuda:", "cuda:0,cpu", "cuda:0,", "CPU", "cuda:0,cuda:0"]
)
def test_wrong_setting_is_refused_by_name(machine, setting):
    machine(4, 1)
    with pytest.raises(StartError, match="devices"):
        resolve_devices(setting, 1.0)


@pytest.mark.parametrize(("setting", "num_gpus"), [("cuda", 0), ("cuda:1", 1), ("cuda:0,cuda:7", 2)])
def test_gpu_that_is_not_there_is_refused_with_the_number_there_is(machine, setting, num_gpus):
    machine(4, num_gpus)
    with pytest.raises(StartError, match=f"{num_gpus} usable"):
        resolve_devices(setting, 1.0)


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("import time; time.sleep(60)", "did not answer within 0.2 s"),
        ("raise SystemExit(3)", "failed"),
        ("print('no number')", "failed"),
        ("pass", "failed"),
    ],
)
def test_driver_that_hangs_or_fails_is_named_with_the_remedy(monkeypatch, probe, reason):
    monkeypatch.setattr(devices, "_PROBE", probe)
    timeout_s = 0.2 if "sleep" in probe else 30.0
    with pytest.raises(StartError, match=reason) as caught:
        resolve_devices("auto", timeout_s)
    assert "set devices to cpu" in str(caught.value)
    assert isinstance(caught.value.__cause__, (subprocess.SubprocessError, ValueError, IndexError))


def test_probe_s_last_line_counts_whatever_a_library_prints_before(monkeypatch):
    monkeypatch.setattr(devices, "_PROBE", "print('a banner'); print(3)")
    assert devices._count_gpus(30.0) == 3
