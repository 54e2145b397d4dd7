"""The findings about GPUs, with a fake NVML and a fake trial of the devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pynvml
import pytest

from sie.config.settings import Settings
from sie.doctor import cuda, gpu, gpu_software
from sie.doctor.cuda import DeviceResult, Trial
from sie.doctor.finding import Finding

GIB = 1 << 30
HEALTHY: dict[str, Any] = {
    "Name": "GPU X",
    "MemoryInfo": SimpleNamespace(total=80 * GIB, free=79 * GIB, used=GIB),
    "ComputeMode": 0,
    "RemappedRows": (0, 0, 0, 0),
    "TotalEccErrors": 0,
    "Temperature": 40,
    "UUID": "",
    "MinorNumber": None,
    "MigMode": None,
    "RetiredPagesPendingStatus": None,
    "Fabric": None,
}


class FakeNvml:
    """The functions of `pynvml` that the doctor asks, over one table of answers a device; None is not supported."""

    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0
    NVML_SUCCESS = 0
    NVML_GPU_FABRIC_STATE_NOT_STARTED = 1
    NVML_GPU_FABRIC_STATE_IN_PROGRESS = 2
    NVML_GPU_FABRIC_STATE_COMPLETED = 3
    c_nvmlGpuFabricInfo_t = pynvml.c_nvmlGpuFabricInfo_t  # noqa: N815  # its name in pynvml

    class NVMLError(Exception):
        pass

    def __init__(self, *devices: dict[str, Any], init_error: str = "") -> None:
        self.devices = [{**HEALTHY, **device} for device in devices]
        self.init_error = init_error
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.NVMLError(self.init_error)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.devices[index]

    def nvmlDeviceGetGpuFabricInfo(self, handle: dict[str, Any], info: Any) -> int:
        if handle["Fabric"] is None:
            raise self.NVMLError("not supported")
        info._obj.state, info._obj.status = handle["Fabric"]
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], place: int) -> dict[str, Any]:
        if place >= len(handle["slices"]):
            raise self.NVMLError("not found")
        return {"UUID": handle["slices"][place]}

    def __getattr__(self, name: str) -> Any:
        def answer(handle: dict[str, Any], *_: int) -> Any:
            if (value := handle[name.removeprefix("nvmlDeviceGet")]) is None:
                raise self.NVMLError("not supported")
            return value

        return answer


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(gpu, "_check_nodes", lambda: iter(()))
    monkeypatch.setattr(gpu, "_DEV", tmp_path)
    monkeypatch.setattr(gpu, "_PCI", tmp_path)
    monkeypatch.setattr(gpu, "try_devices", lambda: tried(0))
    monkeypatch.setattr(gpu_software, "torch_cuda", lambda: "12.6")
    monkeypatch.setattr(gpu, "check_onnxruntime", lambda: iter(()))
    monkeypatch.setattr(gpu, "check_build_tools", lambda: iter(()))


def result(index: int, **changes: Any) -> DeviceResult:
    values = {"device": f"cuda:{index}", "name": "GPU X", "uuid": "", "error": "", "kernel_error": "", "seconds": 1.5}
    return DeviceResult(**{**values, **changes})


def tried(*indices: int, error: str = "", **changes: Any) -> Trial:
    return Trial([result(index, **changes) for index in indices], error)


def look(nvml: Any, devices: str = "auto") -> list[Finding]:
    settings = Settings()
    settings = msgspec.structs.replace(settings, devices=msgspec.structs.replace(settings.devices, devices=devices))
    return list(gpu.check_gpus(settings, nvml))


def bad(nvml: Any, devices: str = "auto") -> list[tuple[str, str]]:
    findings = [finding for finding in look(nvml, devices) if finding.level != "ok"]
    assert all(finding.fix for finding in findings)
    return [(finding.level, finding.message) for finding in findings]


def test_healthy_devices_are_named_with_their_memory():
    nvml = FakeNvml({}, {"Name": "GPU Y"})
    messages = [finding.message for finding in look(nvml)]
    assert messages == [
        "driver 580.1, CUDA 12.8, devices: 2",
        "torch is built for CUDA 12.6",
        "cuda:0 GPU X computes as the processor does, compiled kernels too (1.5 s)",
        f"device 0 GPU X: {79 * 1024} of {80 * 1024} MiB free",
        f"device 1 GPU Y: {79 * 1024} of {80 * 1024} MiB free",
    ]
    assert not nvml.is_open


def test_a_device_has_the_number_that_cuda_gives_it(monkeypatch: pytest.MonkeyPatch):
    """NVML counts by bus, and sees what CUDA_VISIBLE_DEVICES hides."""
    monkeypatch.setattr(gpu, "try_devices", lambda: Trial([result(0, uuid="c"), result(1, uuid="a")]))
    nvml = FakeNvml({"UUID": "GPU-a"}, {"UUID": "GPU-b"}, {"UUID": "GPU-c", "Temperature": 95})
    free = f"{79 * 1024} of {80 * 1024} MiB free"
    assert [finding.message for finding in look(nvml)[4:]] == [
        f"cuda:1 GPU X GPU-a: {free}",
        f"device 1 GPU X GPU-b: {free}, not shown by CUDA (CUDA_VISIBLE_DEVICES)",
        "cuda:0 GPU X GPU-c: 95 °C",
    ]
    assert bad(nvml, "cuda:0,cuda:2")[0] == ("error", "devices names cuda:2, but the last one is cuda:1")


@pytest.mark.parametrize(
    ("fault", "level", "part"),
    [
        ({"ComputeMode": 2}, "error", "compute mode"),
        ({"RemappedRows": (0, 1, 0, 1)}, "error", "could not be replaced"),
        ({"RemappedRows": (0, 1, 1, 0)}, "warn", "is to be replaced"),
        ({"TotalEccErrors": 3}, "warn", "3 memory errors"),
        ({"RetiredPagesPendingStatus": 1}, "warn", "page of memory is to be retired"),
        ({"Fabric": (1, 0)}, "error", "error 802"),
        ({"Fabric": (2, 0)}, "error", "error 802"),
        ({"Fabric": (3, 999)}, "error", "failed with status 999"),
        ({"MigMode": [1, 1], "slices": []}, "error", "MIG is on, but there is no slice"),
        ({"MigMode": [0, 1]}, "warn", "its MIG mode changes"),
        (
            {"MigMode": [1, 1], "slices": ["MIG-1", "MIG-2"]},
            "warn",
            "2 MIG slices, and CUDA shows a process one of them: MIG-1",
        ),
        ({"MinorNumber": 3}, "error", "nvidia3 cannot be opened"),
        ({"Temperature": 95}, "warn", "95 °C"),
        ({"MemoryInfo": SimpleNamespace(total=100, free=5, used=95)}, "warn", "are in use"),
    ],
)
def test_what_is_wrong_with_a_device_is_told_and_the_others_are_fine(fault: dict[str, Any], level: str, part: str):
    findings = look(FakeNvml(fault, {}))
    assert [finding.level for finding in findings[3:]] == [level, "ok"]
    assert part in findings[3].message
    assert findings[3].fix


@pytest.mark.parametrize("state", [1, 2])
@pytest.mark.parametrize(("error", "level"), [("", "warn"), ("Error 802: system not yet initialized", "error")])
def test_a_device_that_computes_before_it_has_joined_the_fabric_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, state: int, error: str, level: str
):
    """Within a slice, or a machine with a part of the GPUs, the driver may never say that it has joined."""
    monkeypatch.setattr(gpu, "try_devices", lambda: Trial([result(0, uuid="GPU-a", error=error)]))
    finding = look(FakeNvml({"Fabric": (state, 0), "UUID": "GPU-a"}))[-1]
    assert finding.level == level
    assert ("though it computes" in finding.message) is (not error)
    assert "nvidia-fabricmanager" in (finding.fix or "")


def test_devices_of_a_fabric_that_is_up_and_one_slice_that_cuda_shows_are_fine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "nvidia3").touch()
    monkeypatch.setattr(gpu, "try_devices", lambda: tried(0, uuid="1"))
    device = {"Fabric": (3, 0), "MigMode": [1, 1], "slices": ["MIG-1"], "UUID": "GPU-a", "MinorNumber": 3}
    findings = look(FakeNvml(device))
    assert [finding.level for finding in findings] == ["ok"] * 4
    assert findings[3].message.startswith("cuda:0 GPU X GPU-a: ")


def test_what_a_device_does_not_support_says_nothing():
    silent: dict[str, Any] = {name: None for name in HEALTHY if name != "Name"}
    assert look(FakeNvml(silent))[-1] == Finding(area="gpu", level="ok", message="device 0 GPU X: healthy")


def test_a_host_without_a_driver_is_fine_unless_cuda_is_asked_for_or_a_card_is_there(tmp_path):
    nvml = FakeNvml(init_error="Driver Not Loaded")
    assert [finding.message for finding in look(nvml)] == ["none; the cores are used"]
    assert bad(nvml, "cuda") == [("error", "devices asks for CUDA, but Driver Not Loaded")]
    card = tmp_path / "0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x040300\n")
    assert bad(nvml) == [], "that is the sound of a card, not the card"
    (card / "class").write_text("0x030200\n")
    assert bad(nvml) == [("warn", "there is an NVIDIA device, but Driver Not Loaded: the cores are used")]


def test_a_driver_that_was_updated_while_it_was_loaded_needs_a_restart():
    (found,) = look(FakeNvml(init_error="Driver/library version mismatch"), "cuda")
    assert found.fix.startswith("restart the host")


def test_what_triton_builds_with_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def messages() -> list[str]:
        return [finding.message for finding in gpu_software.check_build_tools()]

    monkeypatch.setattr(gpu_software, "find_spec", lambda _name: None)
    assert messages() == ["Triton is not installed: models that generate text run many times slower"]
    monkeypatch.setattr(gpu_software, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu_software.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler, header = messages()
    assert compiler.startswith("no C compiler")
    assert header.startswith(f"no {tmp_path / 'Python.h'}")
    (tmp_path / "clang").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    assert messages() == []


def test_an_onnxruntime_without_cuda_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(gpu_software, "find_spec", lambda _name: spec)
    (found,) = gpu_software.check_onnxruntime()
    assert (found.level, found.message) == ("warn", "onnxruntime is built without CUDA: ONNX models run on the cores")
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").touch()
    assert list(gpu_software.check_onnxruntime()) == []
    monkeypatch.setattr(gpu_software, "find_spec", lambda _name: None)
    assert list(gpu_software.check_onnxruntime()) == []


def test_cores_alone_ask_nothing():
    assert [finding.message for finding in look(None, "cpu:2")] == ["not used (devices)"]


@pytest.mark.parametrize(
    ("built", "devices", "expected"),
    [
        ("13.0", "auto", ("error", "torch is built for CUDA 13.0, the driver goes to 12.8")),
        ("", "auto", ("warn", "torch is built without CUDA: the devices stay idle")),
        ("", "cuda", ("error", "torch is built without CUDA: the devices stay idle")),
        (None, "auto", ("error", "torch is not installed")),
    ],
)
def test_torch_has_to_fit_the_driver(monkeypatch: pytest.MonkeyPatch, built: str | None, devices: str, expected):
    monkeypatch.setattr(gpu_software, "torch_cuda", lambda: built)
    assert bad(FakeNvml({}), devices) == [expected]


def test_a_device_that_is_named_but_not_there_is_an_error():
    assert bad(FakeNvml({}), "cuda:0,cuda:1") == [("error", "devices names cuda:1, but the last one is cuda:0")]


def test_a_driver_without_devices():
    assert bad(FakeNvml(), "cuda") == [("error", "driver 580.1, but no device")]
    assert bad(FakeNvml()) == [("warn", "driver 580.1, but no device")]


def test_a_driver_that_never_answers_is_left_behind(monkeypatch: pytest.MonkeyPatch):
    stuck = threading.Event()
    nvml = FakeNvml({})
    nvml.nvmlInit = lambda: stuck.wait(30)  # type: ignore[method-assign]
    monkeypatch.setattr(gpu, "_TIMEOUT_S", 0.05)
    try:
        assert bad(nvml) == [("error", "the driver did not answer within 0.05 s")]
    finally:
        stuck.set()


def test_an_nvml_that_is_broken_is_told_as_that():
    nvml = FakeNvml({})
    nvml.nvmlSystemGetDriverVersion = None  # type: ignore[method-assign]
    ((level, message),) = bad(nvml)
    assert level == "error"
    assert message.startswith("NVML cannot be used: TypeError")


# --- the trial of the devices -------------------------------------------------------------------------------------------


def say(*lines: dict[str, Any]) -> str:
    return "".join(f"print({json.dumps(line)!r}, flush=True)\n" for line in lines)


def try_with(monkeypatch: pytest.MonkeyPatch, code: str, timeout_s: float = 60.0) -> Trial:
    monkeypatch.setattr(cuda, "_COMMAND", [sys.executable, "-c", code])
    return cuda.try_devices(timeout_s)


FINE = {"device": "cuda:0", "name": "GPU X", "uuid": "a", "error": "", "kernel_error": "", "seconds": 2.0}


def test_results_are_read_whatever_a_library_prints_between(monkeypatch: pytest.MonkeyPatch):
    trial = try_with(monkeypatch, "print('a banner')\n" + say({"doing": "importing torch"}, FINE))
    assert trial == Trial([DeviceResult(**FINE)])


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("import time; time.sleep(60)", "no answer within 8 s while computing on cuda:1"),
        ("raise RuntimeError('it broke')", "RuntimeError: it broke while computing on cuda:1"),
        ("import os; os.abort()", f"status -{int(signal.SIGABRT)} while computing on cuda:1"),
        ("import sys; sys.stdout.write('{\"device\": ')", ""),
    ],
)
def test_a_trial_that_hangs_or_dies_says_where(monkeypatch: pytest.MonkeyPatch, end: str, reason: str):
    timeout_s = 8.0 if "sleep" in end else 60.0  # eight: a busy machine takes long to start a program
    trial = try_with(monkeypatch, say(FINE, {"doing": "computing on cuda:1"}) + end, timeout_s)
    assert trial == Trial([DeviceResult(**FINE)], reason)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (
            "Unexpected error from cudaGetDeviceCount() ... Error 802: system not yet initialized",
            "nvidia-fabricmanager",
        ),
        ("The NVIDIA driver on your system is too old (found version 12020)", "update the driver"),
        ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("Error 803: system has unsupported display driver / cuda driver combination", "cuda-compat"),
        ("CUDA error: no kernel image is available for execution on the device", "compute capability"),
        ("No CUDA GPUs are available", "CUDA_VISIBLE_DEVICES"),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "nvidia-modprobe -u"),
        ("OutOfMemoryError: CUDA out of memory.", "`nvidia-smi` shows which"),
        ("AcceleratorError: CUDA error: uncorrectable ECC error encountered", "Xid"),
        ("AssertionError: Torch not compiled with CUDA enabled", "install a build for CUDA"),
        ("something else", "see `nvidia-smi` and `dmesg`"),
    ],
)
def test_each_error_has_its_remedy(monkeypatch: pytest.MonkeyPatch, error: str, part: str):
    for trial in (Trial([], error), tried(0, 1, error=error)):
        monkeypatch.setattr(gpu, "try_devices", lambda trial=trial: trial)
        for devices, level in (("cuda", "error"), ("auto", "warn")):
            found = next(finding for finding in look(FakeNvml({}), devices) if finding.level != "ok")
            assert (found.level, error in found.message, part in found.fix) == (level, True, True)


def test_a_device_that_cannot_run_compiled_kernels_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        gpu, "try_devices", lambda: tried(0, kernel_error="CompilationError: gcc\nPython.h: No such file")
    )
    assert bad(FakeNvml({})) == [
        ("warn", "cuda:0 GPU X computes, but kernels of Triton do not run: Python.h: No such file")
    ]


def test_the_trial_itself_computes_on_the_processor():
    command = [sys.executable, "-m", "sie.doctor.device_trial", "cpu"]
    done = subprocess.run(command, capture_output=True, timeout=100, check=True)
    (found,), doing = cuda._read(done.stdout)
    assert (found.device, found.error, found.kernel_error, doing) == ("cpu", "", "", "computing on cpu")


def test_without_a_device_the_trial_says_why():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "sie.doctor.device_trial", "cuda"]
    done = subprocess.run(command, capture_output=True, timeout=100, check=False, env=env)
    devices, doing = cuda._read(done.stdout)
    assert (devices, doing, done.returncode) == ([], "starting CUDA", 1)


INTERPRETED = """
import torch
from sie.doctor.trial_kernel import double
source, target = torch.arange(8.0), torch.zeros(8)
double(source, target)
assert torch.equal(target, 2 * source), target
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_doubles():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=env, timeout=100, check=True)
