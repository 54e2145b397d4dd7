"""Looks for GPUs as the driver's library and as torch see them, in a process of its own: either may hang or print.

`python -m sie.runtime.gpu_probe` prints a `GpuProbe` as one line of JSON. torch is imported only if there are GPUs, because
that takes a second.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final

import msgspec

_NO_GPU: Final = ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")
_PROC = Path("/proc/driver/nvidia/gpus")
_HIDDEN: Final = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES with which somebody hides every GPU on purpose."""


class GpuProbe(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of this host: num_present by the driver, num_usable by torch, and the error of whoever failed first.

    torch_cuda is the CUDA version of torch's build, empty for a build without CUDA. memory_bytes: the memory of each
    usable GPU, whoever uses it.
    """

    num_present: int = 0
    num_usable: int = 0
    memory_bytes: tuple[int, ...] = ()
    driver: str = ""
    torch: str = ""
    torch_cuda: str = ""
    error: str = ""


def probe() -> GpuProbe:
    """Return the GPUs of this host. None are present if CUDA_VISIBLE_DEVICES hides them all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in _HIDDEN:
        return GpuProbe()
    found = _ask_driver()
    return _ask_torch(found) if found.num_present else found


def _ask_driver() -> GpuProbe:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return GpuProbe(num_present=nvml.nvmlDeviceGetCount(), driver=nvml.nvmlSystemGetDriverVersion())
    except Exception as error:
        if type(error).__name__ in _NO_GPU:
            return GpuProbe()
        return GpuProbe(num_present=len(list(_PROC.glob("*"))), error=f"NVML: {type(error).__name__}: {error}")


def _ask_torch(found: GpuProbe) -> GpuProbe:
    replace = msgspec.structs.replace
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return replace(found, error=f"torch cannot be imported: {type(error).__name__}: {error}")
    found = replace(found, torch=str(torch.__version__), torch_cuda=torch.version.cuda or "")
    if not found.torch_cuda:
        return found
    try:
        torch.cuda.init()  # its error has the reason, while `is_available` only says no
        return replace(found, num_usable=torch.cuda.device_count(), memory_bytes=_sizes(torch), error="")
    except Exception as error:
        return replace(found, error=str(error) or type(error).__name__)


def _sizes(torch: Any) -> tuple[int, ...]:
    """Return each GPU's memory; nothing if one of them does not tell, which its own worker will report."""
    try:
        return tuple(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
    except Exception:
        return ()


if __name__ == "__main__":
    print(msgspec.json.encode(probe()).decode())  # noqa: T201  # the supervisor reads it
