from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from sie.runtime.gpu_probe import GpuProbe
from sie.supervisor import devices
from sie.supervisor.devices import WorkerSlot, resolve_devices
from sie.supervisor.host_resources import StartError


@pytest.fixture
def machine(monkeypatch):
    """Return what sets the number of cores and GPUs of this machine."""

    def make(num_cores: int, num_gpus: int | None = None, free_bytes: int = 1 << 40):
        def probe_gpus(_timeout_s):
            assert num_gpus is not None, "nothing here needs to know about GPUs"
            return GpuProbe(num_present=num_gpus, num_usable=num_gpus)

        monkeypatch.setattr(devices, "read_memory", lambda: (1 << 41, free_bytes))
        monkeypatch.setattr(devices, "usable_cores", lambda: list(range(num_cores)))
        monkeypatch.setattr(devices, "_probe_gpus", probe_gpus)
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
    monkeypatch.setattr(devices, "_PROBE", [sys.executable, "-c", probe])
    timeout_s = 0.2 if "sleep" in probe else 30.0
    with pytest.raises(StartError, match=reason) as caught:
        resolve_devices("auto", timeout_s)
    assert "set devices to cpu" in str(caught.value)
    assert isinstance(caught.value.__cause__, (subprocess.SubprocessError, msgspec.MsgspecError, IndexError))


def test_probe_s_last_line_counts_whatever_a_library_prints_before(monkeypatch):
    monkeypatch.setattr(devices, "_PROBE", [sys.executable, "-c", "print('a banner'); print('{\"num_usable\": 3}')"])
    assert devices._probe_gpus(30.0).num_usable == 3


# --- GPUs that are there and cannot be used, by stand-ins for the driver's library and torch ------------------------------

NVML = """
class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
class NVMLError_LibRmVersionMismatch(NVMLError): pass
def nvmlInit(): {init}
def nvmlDeviceGetCount(): return 8
def nvmlSystemGetDriverVersion(): return "535.161.08"
"""
TORCH = """
from types import SimpleNamespace
__version__ = "2.13.0"
version = SimpleNamespace(cuda={cuda!r})
def _init():
    error = {error!r}
    if error: raise RuntimeError(error)
def _properties(i):
    if not {sizes!r}: raise RuntimeError('lost')
    return SimpleNamespace(total_memory={sizes!r}[i])
cuda = SimpleNamespace(init=_init, device_count=lambda: 8, get_device_properties=_properties)
"""


PROBE_WITH_PROC = """
import pathlib, msgspec
from sie.runtime import gpu_probe
gpu_probe._PROC = pathlib.Path("{}")
print(msgspec.json.encode(gpu_probe.probe()).decode())
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return what gives this host a driver's library and a torch, for the processes that it starts."""

    def make(nvml="pass", torch="", **variables):
        (tmp_path / "pynvml.py").write_text(NVML.format(init=nvml))
        (tmp_path / "torch.py").write_text(torch)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver"
NOT_STARTED = "CUDA error: system not yet initialized\nCUDA kernel errors might be asynchronously reported"
NO_LIBRARY = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"


@pytest.mark.parametrize("setting", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize(
    ("torch", "words"),
    [
        (TORCH.format(cuda=None, error="", sizes=[]), "is a build without CUDA"),
        (TORCH.format(cuda="13.0", error=TOO_OLD, sizes=[]), "too old for CUDA 13.0 of torch 2.13.0"),
        (TORCH.format(cuda="13.0", error=NOT_STARTED, sizes=[]), "nvidia-fabricmanager"),
        (TORCH.format(cuda="13.0", error=NO_LIBRARY, sizes=[]), "libcuda.so.1 is missing"),
        (TORCH.format(cuda="13.0", error="CUDA error:\nsomething new", sizes=[]), "something new"),
        ("raise OSError('libcudart.so.13: cannot open')", "torch cannot be imported: OSError: libcudart.so.13"),
    ],
)
def test_gpus_that_torch_cannot_use_stop_the_start_with_the_reason(host, setting, torch, words):
    host(torch=torch)
    with pytest.raises(StartError, match=f"this host has 8 GPUs that torch cannot use: .*{words}") as caught:
        resolve_devices(setting, 30.0)
    assert ("set devices to cpu to serve from the CPU on purpose" in str(caught.value)) == (setting == "auto")


@pytest.mark.parametrize("sizes", [[80 << 30] * 8, []])
def test_gpus_that_torch_can_use_get_a_worker_each(host, sizes):
    host(torch=TORCH.format(cuda="13.0", error="", sizes=sizes))
    assert [slot.memory_bytes for slot in resolve_devices("auto", 30.0)] == (sizes or [0] * 8)


@pytest.mark.parametrize("variables", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_a_host_without_a_driver_or_with_hidden_gpus_serves_from_its_processor(host, variables):
    nvml = "pass" if variables else "raise NVMLError_LibraryNotFound"
    host(nvml, "raise AssertionError('nobody needs torch')", **variables)
    assert {slot.device for slot in resolve_devices("auto", 30.0)} == {"cpu"}


def test_a_driver_s_library_that_fails_is_no_reason_to_look_no_further(host, tmp_path, monkeypatch):
    """For example after an update of the driver without a reboot; /proc still lists the GPUs."""
    host(
        "raise NVMLError_LibRmVersionMismatch('Driver/library version mismatch')",
        TORCH.format(cuda="13.0", error=TOO_OLD, sizes=[]),
    )
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(devices, "_PROBE", [sys.executable, "-c", PROBE_WITH_PROC.format(tmp_path / "gpus")])
    with pytest.raises(StartError, match="this host has 1 GPUs that torch cannot use: the driver"):
        resolve_devices("auto", 30.0)
