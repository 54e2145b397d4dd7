"""The findings about GPUs, with a fake NVML."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.config.settings import Settings
from sie.doctor import gpu
from sie.doctor.finding import Finding

GIB = 1 << 30
HEALTHY: dict[str, Any] = {
    "Name": "GPU X",
    "MemoryInfo": SimpleNamespace(total=80 * GIB, free=79 * GIB, used=GIB),
    "ComputeMode": 0,
    "RemappedRows": (0, 0, 0, 0),
    "TotalEccErrors": 0,
    "Temperature": 40,
}


class FakeNvml:
    """The functions of `pynvml` that the doctor asks, over one table of answers a device; None is not supported."""

    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0

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

    def __getattr__(self, name: str) -> Any:
        def answer(handle: dict[str, Any], *_: int) -> Any:
            if (value := handle[name.removeprefix("nvmlDeviceGet")]) is None:
                raise self.NVMLError("not supported")
            return value

        return answer


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(gpu, "_check_nodes", lambda: iter(()))
    monkeypatch.setattr(gpu, "torch_cuda", lambda: "12.6")
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(gpu, "_PCI", tmp_path)


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
        f"cuda:0 GPU X: {79 * 1024} of {80 * 1024} MiB free",
        f"cuda:1 GPU Y: {79 * 1024} of {80 * 1024} MiB free",
    ]
    assert not nvml.is_open


@pytest.mark.parametrize(
    ("fault", "level", "part"),
    [
        ({"ComputeMode": 2}, "error", "compute mode"),
        ({"RemappedRows": (0, 1, 0, 1)}, "error", "could not be replaced"),
        ({"RemappedRows": (0, 1, 1, 0)}, "warn", "is to be replaced"),
        ({"TotalEccErrors": 3}, "warn", "3 memory errors"),
        ({"Temperature": 95}, "warn", "95 °C"),
        ({"MemoryInfo": SimpleNamespace(total=100, free=5, used=95)}, "warn", "are in use"),
    ],
)
def test_what_is_wrong_with_a_device_is_told_and_the_others_are_fine(fault: dict[str, Any], level: str, part: str):
    findings = look(FakeNvml(fault, {}))
    assert [finding.level for finding in findings[2:]] == [level, "ok"]
    assert part in findings[2].message


def test_what_a_device_does_not_support_says_nothing():
    silent: dict[str, Any] = {name: None for name in HEALTHY if name != "Name"}
    assert look(FakeNvml(silent))[-1] == Finding(area="gpu", level="ok", message="cuda:0 GPU X: healthy")


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


def test_a_host_without_a_compiler_is_told_what_triton_needs(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    ((level, message),) = bad(FakeNvml({"Name": "GPU Y"}))
    assert level == "warn"
    assert "no C compiler" in message
    (tmp_path / "clang").touch(mode=0o755)
    assert bad(FakeNvml({"Name": "GPU Y"})) == []


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
    monkeypatch.setattr(gpu, "torch_cuda", lambda: built)
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
