"""Tries the devices that CUDA shows, in a process of its own with a time limit, and explains what goes wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Final

import msgspec

from sie.doctor.finding import Finding
from sie.runtime.own_modules import run_module

_TIMEOUT_S = 120.0
"""A first import of torch from a cold disk takes half a minute, and each device a few seconds."""
_COMMAND = [*run_module("sie.doctor.device_trial"), "cuda"]
_RESTART = "restart the host"
_REMEDIES: Final = (
    (
        ("system not yet initialized", "error 802"),
        "the NVSwitch fabric is not set up (CUDA error 802)",
        "systemctl enable --now nvidia-fabricmanager, in the version of the driver",
    ),
    (
        ("is too old", "driver version is insufficient", "forward compatibility was attempted"),
        "the driver is too old for this torch",
        "update the driver, or install a torch for an older CUDA: make clean serve TORCH_INDEX=...",
    ),
    (
        ("unsupported display driver / cuda driver combination", "error 803"),
        "libcuda and the loaded driver have different versions",
        "restart the host after an update of the driver; in a container, remove a cuda-compat package",
    ),
    (
        ("no kernel image is available",),
        "this torch has no kernels for this device",
        "install a build of torch for its compute capability: make clean serve TORCH_INDEX=...",
    ),
    (
        ("no cuda gpus are available", "no cuda-capable device", "found no nvidia driver"),
        "CUDA shows no device",
        "see CUDA_VISIBLE_DEVICES, and whether this user may open /dev/nvidia*",
    ),
    (
        ("unknown error", "error 999"),
        "CUDA cannot start",
        f"`nvidia-modprobe -u` as root, then look at `dmesg`; if that does not help, {_RESTART}",
    ),
    (("out of memory",), "other processes have all of the device's memory", "`nvidia-smi` shows which"),
    (
        ("ecc error", "illegal memory access", "hardware", "launch failure"),
        "the device fails",
        f"see `dmesg` for Xid messages; reset it or {_RESTART}",
    ),
    (("not compiled with cuda",), "torch is built without CUDA", "install a build for CUDA: make clean serve"),
)
"""Parts of an error's text in lower case, what they mean, and the remedy. Source: cuda.h, torch/csrc/cuda/Module.cpp."""
_UNKNOWN = ("a calculation fails", "see `nvidia-smi` and `dmesg`")


class DeviceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one device's trial. uuid is empty if CUDA does not report it, and error if the trial succeeded."""

    device: str
    name: str
    uuid: str
    error: str
    kernel_error: str
    seconds: float


class Trial(msgspec.Struct, frozen=True):
    """The devices that were tried, in CUDA's order, and the error that ended the trial early."""

    devices: list[DeviceResult]
    error: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every device that CUDA shows is known by its UUID."""
        return not self.error and all(result.uuid for result in self.devices)

    def index_of(self, uuid: str) -> int | None:
        """Return the CUDA index of a device or MIG slice, or None if CUDA does not show it."""
        for index, result in enumerate(self.devices):
            if result.uuid and _bare(result.uuid) == _bare(uuid):
                return index
        return None


def try_devices(timeout_s: float = _TIMEOUT_S) -> Trial:
    """Run the trial and return its results; a crash or a hang becomes the trial's error."""
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter and module
            _COMMAND, capture_output=True, timeout=timeout_s, check=False, process_group=0
        )
    except subprocess.TimeoutExpired as error:
        devices, doing = _read(error.stdout or b"")
        return Trial(devices, f"no answer within {timeout_s:g} s while {doing}")
    devices, doing = _read(done.stdout)
    if done.returncode == 0:
        return Trial(devices)
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    reason = next((line for line in reversed(lines) if line.strip()), f"status {done.returncode}")
    return Trial(devices, f"{reason} while {doing}")


def _read(output: bytes) -> tuple[list[DeviceResult], str]:
    """Return the results, and the last step that began."""
    devices: list[DeviceResult] = []
    doing = "starting"
    for line in output[: output.rfind(b"\n") + 1].splitlines():
        if line.startswith(b'{"device"'):
            devices.append(msgspec.json.decode(line, type=DeviceResult))
        elif line.startswith(b'{"doing"'):
            doing = msgspec.json.decode(line)["doing"]
    return devices, doing


def trial_findings(trial: Trial, *, is_required: bool) -> Iterator[Finding]:
    """Yield a finding for each device, and one for a trial that did not come to its end."""
    level = "error" if is_required else "warn"
    for result in trial.devices:
        label = f"{result.device} {result.name}"
        if result.error:
            meaning, fix = _explain(result.error)
            yield Finding(area="gpu", level=level, message=f"{label}: {meaning}: {result.error}", fix=fix)
        elif result.kernel_error:
            message = f"{label} computes, but kernels of Triton do not run: {_last_line(result.kernel_error)}"
            fix = "models that generate text run many times slower; see the finding about a compiler, or the message"
            yield Finding(area="gpu", level="warn", message=message, fix=fix)
        else:
            message = f"{label} computes as the processor does, compiled kernels too ({result.seconds:.1f} s)"
            yield Finding(area="gpu", level="ok", message=message)
    if trial.error:
        meaning, fix = _explain(trial.error)
        yield Finding(area="gpu", level=level, message=f"{meaning}: {trial.error}", fix=fix)


def _explain(error: str) -> tuple[str, str]:
    """Return what an error means, and the remedy."""
    text = error.lower()
    return next(((meaning, fix) for parts, meaning, fix in _REMEDIES if any(p in text for p in parts)), _UNKNOWN)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
