"""Checks GPUs: driver, devices, their health, and whether torch can use them. Asks NVML, never CUDA.

A call into a stuck driver never returns. So all calls run on a thread, which is abandoned in this case.
"""

from __future__ import annotations

import importlib
import os
import queue
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sie.config.limits import MIB
from sie.config.settings import Settings
from sie.doctor.finding import Finding
from sie.doctor.software import torch_cuda

_TIMEOUT_S = 5.0
_HOT_C = 90
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_CONTROL_NODE = Path("/dev/nvidiactl")
_GET_DRIVER = "install NVIDIA's driver for this kernel; `nvidia-smi` has to work"


def wants_gpu(settings: Settings) -> bool:
    """Return whether the settings ask for GPUs, or would use an available one."""
    devices = settings.devices.devices
    return devices.startswith("cuda") or (devices == "auto" and _CONTROL_NODE.exists())


def count_workers(settings: Settings) -> int:
    """Return how many workers a start would run, estimated without asking the driver."""
    devices = settings.devices.devices
    if match := re.fullmatch(r"cpu:(\d+)", devices):
        return int(match[1])
    if devices.startswith("cuda:"):
        return len(devices.split(","))
    return max(1, len(list(Path("/proc/driver/nvidia/gpus").glob("*")))) if wants_gpu(settings) else 1


def check_gpus(settings: Settings, nvml: Any = None) -> Iterator[Finding]:
    """Check driver and devices. nvml is the `pynvml` module, or a stand-in with the same functions."""
    if settings.devices.devices.startswith("cpu"):
        yield Finding(area="gpu", level="ok", message="not used (devices)")
        return
    answers: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(settings, nvml, answers), daemon=True).start()
    try:
        yield from answers.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        message = f"the driver did not answer within {_TIMEOUT_S:g} s"
        yield _error(message, "see `dmesg` for Xid messages; a host whose driver is stuck has to be restarted")


def _answer(settings: Settings, nvml: Any, answers: queue.SimpleQueue[list[Finding]]) -> None:
    try:
        answers.put(list(_ask(settings, nvml or importlib.import_module("pynvml"))))
    except Exception as error:  # no error may look like a driver that does not answer
        fix = f"{sys.prefix}/bin/pip install --force-reinstall nvidia-ml-py"
        answers.put([_error(f"NVML cannot be used: {type(error).__name__}: {error}", fix)])


def _ask(settings: Settings, nvml: Any) -> Iterator[Finding]:
    is_required = settings.devices.devices.startswith("cuda")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield _no_driver(str(error), is_required)
        return
    try:
        count = nvml.nvmlDeviceGetCount()
        driver, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
        if count == 0:
            level = "error" if is_required else "warn"
            yield Finding(area="gpu", level=level, message=f"driver {driver}, but no device", fix=_GET_DRIVER)
            return
        yield Finding(area="gpu", level="ok", message=f"driver {driver}, CUDA {_version(cuda)}, devices: {count}")
        yield _check_torch(torch_cuda(), cuda, is_required)
        yield from _check_compiler()
        yield from _check_named(settings.devices.devices, count)
        yield from _check_nodes()
        for index in range(count):
            yield from _check_device(nvml, index)
    except nvml.NVMLError as error:
        yield _error(f"the driver fails: {error}", "see `nvidia-smi` and `dmesg`; restarting the host may help")
    finally:
        nvml.nvmlShutdown()


def _no_driver(reason: str, is_required: bool) -> Finding:
    if is_required:
        return _error(f"devices asks for CUDA, but {reason}", _GET_DRIVER)
    if _has_card():
        message = f"there is an NVIDIA device, but {reason}: the cores are used"
        return Finding(area="gpu", level="warn", message=message, fix=_GET_DRIVER)
    return Finding(area="gpu", level="ok", message="none; the cores are used")


def _has_card() -> bool:
    """Return whether an NVIDIA display or 3D controller is on the PCI bus."""
    for device in _PCI.glob("*"):
        try:
            if (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith("0x03"):
                return True
        except OSError:
            continue
    return False


def _check_torch(built: str | None, driver_cuda: int, is_required: bool) -> Finding:
    """Compare torch's CUDA version with the driver's; a driver runs all versions up to its own major version."""
    if built is None:
        return _error("torch is not installed", "install it: https://pytorch.org/get-started")
    if not built:
        message = "torch is built without CUDA: the devices stay idle"
        fix = "install a build for CUDA: https://pytorch.org/get-started"
        return Finding(area="gpu", level="error" if is_required else "warn", message=message, fix=fix)
    if int(built.partition(".")[0]) > driver_cuda // 1000:
        fix = "update the driver, or install a torch built for an older CUDA"
        return _error(f"torch is built for CUDA {built}, the driver goes to {_version(driver_cuda)}", fix)
    return Finding(area="gpu", level="ok", message=f"torch is built for CUDA {built}")


def _check_compiler() -> Iterator[Finding]:
    """Look for the C compiler that Triton needs for its kernel launchers. Source: triton 3.6, `runtime/build.py`."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        message = "no C compiler for Triton: models that generate text run many times slower"
        yield Finding(area="gpu", level="warn", message=message, fix="install gcc or clang, or name one in CC")


def _check_named(devices: str, count: int) -> Iterator[Finding]:
    for device in devices.split(",") if devices.startswith("cuda:") else []:
        if int(device.removeprefix("cuda:")) >= count:
            yield _error(f"devices names {device}, but the last one is cuda:{count - 1}", "name devices that are there")


def _check_nodes() -> Iterator[Finding]:
    for node in (_CONTROL_NODE, Path("/dev/nvidia-uvm")):
        if not os.access(node, os.R_OK | os.W_OK):
            yield _error(f"{node} cannot be opened", "`nvidia-modprobe -c 0 -u` as root makes it; see also its mode")


def _check_device(nvml: Any, index: int) -> Iterator[Finding]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = f"cuda:{index} {nvml.nvmlDeviceGetName(handle)}"
    faults = list(_device_faults(nvml, handle, name))
    yield from faults
    memory = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if not faults:
        free = "healthy" if memory is None else f"{memory.free // MIB} of {memory.total // MIB} MiB free"
        yield Finding(area="gpu", level="ok", message=f"{name}: {free}")


def _device_faults(nvml: Any, handle: Any, name: str) -> Iterator[Finding]:
    """Yield the faults of one device. Unsupported queries are skipped."""
    if _try(nvml, nvml.nvmlDeviceGetComputeMode, handle) == nvml.NVML_COMPUTEMODE_PROHIBITED:
        yield _error(f"{name}: its compute mode allows no work", "nvidia-smi -c DEFAULT")
    rows = _try(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None and rows[3]:
        yield _error(f"{name}: a broken row of memory could not be replaced", "replace the device")
    elif rows is not None and rows[2]:
        message = f"{name}: a broken row of memory is to be replaced"
        yield Finding(area="gpu", level="warn", message=message, fix="reset the device or restart the host when idle")
    uncorrected = _try(
        nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    if uncorrected:
        message = f"{name}: {uncorrected} memory errors that could not be corrected since the driver was loaded"
        yield Finding(area="gpu", level="warn", message=message, fix="restart the host; if they return, replace it")
    temperature = _try(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    if temperature is not None and temperature >= _HOT_C:
        yield Finding(area="gpu", level="warn", message=f"{name}: {temperature} °C", fix="see to its cooling")
    memory = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None and memory.used > 0.9 * memory.total:
        message = f"{name}: {memory.used // MIB} of {memory.total // MIB} MiB are in use"
        yield Finding(area="gpu", level="warn", message=message, fix="`nvidia-smi` shows by whom")


def _try(nvml: Any, call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _error(message: str, fix: str) -> Finding:
    return Finding(area="gpu", level="error", message=message, fix=fix)


def _version(cuda: int) -> str:
    """Return `12.8` for NVML's form 12080."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"
