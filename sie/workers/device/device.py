"""Owns what a worker asks of its device: its name in torch, and the number format its models run in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sie.values.errors import BadRequest

DtypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
_CPU_FLAGS_OF_BF16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # "bf16" is ARM's
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a worker's `cpu`, `cpu:N`, `cuda` or `cuda:N`.

    Every CPU worker runs on torch's one CPU device: N only says which share of the cores it is pinned to. A GPU becomes the
    one that this thread launches kernels on. Raises BadRequest for another name, or a GPU that is not there.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise BadRequest(f"device {name!r} is not one of cpu, cpu:N, cuda, cuda:N")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count():
        raise BadRequest(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(int(index or 0))  # torch's own operations look at their tensors, Triton's kernels do not
    return torch.device("cuda", int(index or 0))


def choose_dtype(setting: DtypeSetting, device: torch.device) -> torch.dtype:
    """Return the format that weights and activations have: bfloat16 where the device computes in it, else float32.

    Raises BadRequest for float16 on a CPU, where it is slower than float32 and overflows.
    """
    if setting == "auto":
        return torch.bfloat16 if _has_bf16(device) else torch.float32
    if setting == "float16" and device.type == "cpu":
        raise BadRequest("dtype float16 needs a GPU; use bfloat16 or float32 on a CPU")
    return _DTYPES[setting]


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(cpu_flags() & _CPU_FLAGS_OF_BF16)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device. On a GPU it may arrive later: what is launched there waits for it.

    Out of page-locked memory, since from any other the copy would wait for all that was launched before.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def read(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU once its device has computed it: one copy, one wait."""
    if tensor.device.type != "cuda":
        return tensor
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    found.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return found


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction set flags of the first core, empty where the kernel does not list them."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return frozenset(flags.partition(":")[2].split())
