"""Resolves a worker's device in torch, chooses the number format of its models, and copies tensors to and from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sie.values.errors import BadRequest

DtypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
_CPU_FLAGS_OF_BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # "bf16" is ARM's
_ALIGNED = 8
"""Bytes of the largest number that is copied."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a worker's `cpu`, `cpu:N`, `cuda` or `cuda:N`.

    Every CPU worker runs on torch's one CPU device; N only selects its share of the cores. A GPU becomes the current
    device of this thread, on which it launches kernels. Raises BadRequest for another name or a missing GPU.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise BadRequest(f"device {name!r} is not one of cpu, cpu:N, cuda, cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise BadRequest(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    # torch's operations use their tensors' device, but Triton's kernels use the current one.
    torch.cuda.set_device(int(index or 0))
    return torch.device("cuda", int(index or 0))


def choose_dtype(setting: DtypeSetting, device: torch.device) -> torch.dtype:
    """Return the format of weights and activations: bfloat16 if the device computes in it, else float32.

    Raises BadRequest for float16 on a CPU, where it is slower than float32 and overflows.
    """
    if setting == "auto":
        return torch.bfloat16 if _has_bf16(device) else torch.float32
    if setting == "float16" and device.type == "cpu":
        raise BadRequest("dtype float16 needs a GPU; use bfloat16 or float32 on a CPU")
    return _DTYPES[setting]


@cache
def is_ampere(device: torch.device) -> bool:
    """Return whether a GPU is of the Ampere generation or newer: it computes in bfloat16 and runs flash attention."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return is_ampere(device)
    return bool(cpu_flags() & _CPU_FLAGS_OF_BF16)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. On a GPU the copy is asynchronous; later launches wait for it.

    It copies from page-locked memory: a copy from other memory would wait for all earlier launches.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def move_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device as `move` does, in one copy. The tensors have their shapes and formats, and share memory.

    On the CPU they are the arrays themselves.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    lasts = list(accumulate(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays))
    firsts = [0, *lasts[:-1]]
    packed = np.empty(lasts[-1], np.uint8)
    for array, first in zip(arrays, firsts, strict=True):
        packed[first : first + array.nbytes].view(array.dtype)[:] = array.ravel()
    moved = move(torch.from_numpy(packed), device)
    return [
        moved[first : first + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, first in zip(arrays, firsts, strict=True)
    ]


def read(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU once its device has computed it: one copy, one wait."""
    return read_later(tensor)()


def read_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the CPU. Return a function that waits until its device has computed it, and returns it."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    found.copy_(tensor, non_blocking=True)
    wait_copied = wait_later(tensor.device)

    def wait() -> Tensor:
        wait_copied()
        return found

    return wait


def wait_later(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until a device has computed all that this thread has launched up to now.

    It raises the errors of what was launched.
    """
    if device.type != "cuda":
        return lambda: None
    computed = torch.cuda.Event()
    computed.record(torch.cuda.current_stream(device))
    return computed.synchronize


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction set flags of the first core; empty if the kernel does not list them."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())
