"""Checks GPUs: driver, devices, their health, and whether torch can use them. Asks NVML here, and CUDA in a process.

A call into a stuck driver never returns. So all calls run on a thread, which is abandoned in this case.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sie.config.limits import MIB
from sie.config.settings import Settings
from sie.doctor.cuda import Trial, trial_findings, try_devices
from sie.doctor.finding import Finding, Level
from sie.doctor.gpu_software import check_build_tools, check_onnxruntime, check_torch, version_text

_TIMEOUT_S = 5.0
_HOT_C = 90
_PCI = Path("/sys/bus/pci/devices")
_DEV = Path("/dev")
_NVIDIA = "0x10de"
_CONTROL_NODE = Path("/dev/nvidiactl")
_GET_DRIVER = "install NVIDIA's driver for this kernel; `nvidia-smi` has to work"
_RESET = "reset the device or restart the host when idle"
_START_FABRIC = "systemctl enable --now nvidia-fabricmanager, in the version of the driver"

T = TypeVar("T")


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
    try:
        yield from _check(nvml or importlib.import_module("pynvml"), settings.devices.devices)
    except TimeoutError:
        message = f"the driver did not answer within {_TIMEOUT_S:g} s"
        yield _error(message, "see `dmesg` for Xid messages; a host whose driver is stuck has to be restarted")
    except Exception as error:  # no error may look like a driver that does not answer
        fix = f"{sys.prefix}/bin/pip install --force-reinstall nvidia-ml-py"
        yield _error(f"NVML cannot be used: {type(error).__name__}: {error}", fix)


def _in_time(call: Callable[[], T]) -> T:
    """Return the result of a call into the driver. Raises the call's errors, and TimeoutError if it hangs."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def answer() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:  # raised again by the thread that waits
            answers.put((None, error))

    threading.Thread(target=answer, daemon=True).start()
    try:
        value, error = answers.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only where the call returns that


def _check(nvml: Any, devices: str) -> Iterator[Finding]:
    is_required = devices.startswith("cuda")
    try:
        _in_time(nvml.nvmlInit)
    except nvml.NVMLError as error:
        yield _no_driver(str(error), is_required)
        return
    try:
        yield from _check_driver(nvml, devices, is_required)
    except nvml.NVMLError as error:
        yield _error(f"the driver fails: {error}", "see `nvidia-smi` and `dmesg`; restarting the host may help")
    _in_time(nvml.nvmlShutdown)


def _check_driver(nvml: Any, devices: str, is_required: bool) -> Iterator[Finding]:
    driver, cuda, count = _in_time(
        lambda: (
            nvml.nvmlSystemGetDriverVersion(),
            nvml.nvmlSystemGetCudaDriverVersion_v2(),
            nvml.nvmlDeviceGetCount(),
        )
    )
    if count == 0:
        level: Level = "error" if is_required else "warn"
        yield Finding(area="gpu", level=level, message=f"driver {driver}, but no device", fix=_GET_DRIVER)
        return
    yield Finding(area="gpu", level="ok", message=f"driver {driver}, CUDA {version_text(cuda)}, devices: {count}")
    torch = check_torch(cuda, is_required=is_required)
    yield torch
    yield from check_build_tools()
    yield from check_onnxruntime()
    yield from _check_nodes()
    trial = try_devices() if torch.level == "ok" else None
    if trial is not None:
        yield from trial_findings(trial, is_required=is_required)
        yield from _check_named(devices, trial)
    yield from _in_time(lambda: [found for i in range(count) for found in _check_device(nvml, i, trial)])


def _no_driver(reason: str, is_required: bool) -> Finding:
    fix = _GET_DRIVER
    if "version mismatch" in reason.lower():  # NVML's words for a driver that was updated while it was loaded
        fix = "restart the host: the loaded driver is older or newer than its libraries"
    if is_required:
        return _error(f"devices asks for CUDA, but {reason}", fix)
    if _has_card():
        message = f"there is an NVIDIA device, but {reason}: the cores are used"
        return Finding(area="gpu", level="warn", message=message, fix=fix)
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


def _check_named(devices: str, trial: Trial) -> Iterator[Finding]:
    """Compare the setting with what CUDA shows, which CUDA_VISIBLE_DEVICES and MIG make fewer than the driver has."""
    count = len(trial.devices)
    for device in devices.split(",") if devices.startswith("cuda:") and not trial.error else []:
        if int(device.removeprefix("cuda:")) >= count:
            yield _error(f"devices names {device}, but the last one is cuda:{count - 1}", "name devices that are there")


def _check_nodes() -> Iterator[Finding]:
    for node in (_CONTROL_NODE, Path("/dev/nvidia-uvm")):
        if not os.access(node, os.R_OK | os.W_OK):
            yield _error(f"{node} cannot be opened", "`nvidia-modprobe -c 0 -u` as root makes it; see also its mode")


def _check_device(nvml: Any, number: int, trial: Trial | None) -> Iterator[Finding]:
    """Check one device, under CUDA's number for it where the trial has shown that: NVML counts in another order."""
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    uuid = _try(nvml, nvml.nvmlDeviceGetUUID, handle) or ""
    slices = _mig_slices(nvml, handle)
    name = f"{nvml.nvmlDeviceGetName(handle)} {uuid}".strip()
    index = None if trial is None else next(filter(_is_number, map(trial.index_of, (uuid, *slices))), None)
    is_hidden = trial is not None and trial.is_complete and index is None and not slices
    name = f"device {number} {name}" if index is None else f"cuda:{index} {name}"
    computes = index is not None and trial is not None and not trial.devices[index].error
    faults = [
        *_device_faults(nvml, handle, name),
        *_fabric_faults(nvml, handle, name, computes=computes),
        *_mig_faults(nvml, handle, name, slices),
    ]
    if (node := _closed_node(nvml, handle)) is not None:
        fix = f"`nvidia-modprobe -c {node.name.removeprefix('nvidia')} -u` as root makes it; see also its mode"
        faults.append(_error(f"{name}: {node} cannot be opened", fix))
    yield from faults
    memory = _try(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if not faults:
        free = "healthy" if memory is None else f"{memory.free // MIB} of {memory.total // MIB} MiB free"
        hidden = ", not shown by CUDA (CUDA_VISIBLE_DEVICES)" if is_hidden else ""
        yield Finding(area="gpu", level="ok", message=f"{name}: {free}{hidden}")


def _is_number(index: int | None) -> bool:
    return index is not None


def _closed_node(nvml: Any, handle: Any) -> Path | None:
    """Return the device node, if it cannot be opened."""
    minor = _try(nvml, nvml.nvmlDeviceGetMinorNumber, handle)
    node = _DEV / f"nvidia{minor}"
    return None if minor is None or os.access(node, os.R_OK | os.W_OK) else node


def _mig_slices(nvml: Any, handle: Any) -> list[str]:
    """Return the UUIDs of a device's MIG slices."""
    mode = _try(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None or not mode[0]:
        return []
    found = (
        _try(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
        for place in range(_try(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    )
    return [nvml.nvmlDeviceGetUUID(one) for one in found if one is not None]


def _mig_faults(nvml: Any, handle: Any, name: str, slices: list[str]) -> Iterator[Finding]:
    mode = _try(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode is None:
        return
    if mode[0] != mode[1]:
        message = f"{name}: its MIG mode changes with the next reset"
        yield Finding(area="gpu", level="warn", message=message, fix=_RESET)
    if mode[0] and not slices:
        fix = "make slices (`nvidia-smi mig -cgi ... -C`), or turn MIG off (`nvidia-smi -mig 0`)"
        yield _error(f"{name}: MIG is on, but there is no slice: CUDA cannot use it", fix)
    if len(slices) > 1:
        message = f"{name}: {len(slices)} MIG slices, and CUDA shows a process one of them: {', '.join(slices)}"
        fix = "start a server for each, with CUDA_VISIBLE_DEVICES=MIG-..."
        yield Finding(area="gpu", level="warn", message=message, fix=fix)


def _device_faults(nvml: Any, handle: Any, name: str) -> Iterator[Finding]:
    """Yield the faults of one device. Unsupported queries are skipped."""
    if _try(nvml, nvml.nvmlDeviceGetComputeMode, handle) == nvml.NVML_COMPUTEMODE_PROHIBITED:
        yield _error(f"{name}: its compute mode allows no work", "nvidia-smi -c DEFAULT")
    rows = _try(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None and rows[3]:
        yield _error(f"{name}: a broken row of memory could not be replaced", "replace the device")
    elif rows is not None and rows[2]:
        message = f"{name}: a broken row of memory is to be replaced"
        yield Finding(area="gpu", level="warn", message=message, fix=_RESET)
    if _try(nvml, nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle):
        message = f"{name}: a broken page of memory is to be retired"
        yield Finding(area="gpu", level="warn", message=message, fix=_RESET)
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


def _fabric_faults(nvml: Any, handle: Any, name: str, *, computes: bool) -> Iterator[Finding]:
    """Check that a device behind NVSwitch has joined the fabric: until then CUDA fails with error 802.

    A device that computed in the trial works alone all the same: then this is a warning for those that work together.
    """
    info = nvml.c_nvmlGpuFabricInfo_t()
    if _try(nvml, nvml.nvmlDeviceGetGpuFabricInfo, handle, ctypes.byref(info)) is None:
        return
    if info.state in (nvml.NVML_GPU_FABRIC_STATE_NOT_STARTED, nvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS):
        message = f"{name}: it has not joined the NVSwitch fabric"
        if computes:
            message += ", though it computes: devices that work together may not reach it"
            yield Finding(area="gpu", level="warn", message=message, fix=_START_FABRIC)
        else:
            yield _error(f"{message}: CUDA fails with error 802", _START_FABRIC)
    elif info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status != nvml.NVML_SUCCESS:
        yield _error(f"{name}: the NVSwitch fabric failed with status {info.status}", _START_FABRIC)


def _try(nvml: Any, call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except nvml.NVMLError:
        return None


def _error(message: str, fix: str) -> Finding:
    return Finding(area="gpu", level="error", message=message, fix=fix)
