"""Turns the setting `devices` into one worker slot per device. Counts GPUs in a helper process with a time limit."""

from __future__ import annotations

import re
import subprocess
from typing import Final

import msgspec

from sie.runtime.gpu_probe import GpuProbe
from sie.runtime.own_modules import run_module
from sie.shm.segment import read_memory
from sie.supervisor.core_shares import read_places, share_cores, share_near
from sie.supervisor.gpu_cores import find_near_cores
from sie.supervisor.host_resources import StartError, usable_cores

_BYTES_PER_CPU_WORKER = 2 << 30
"""Memory per CPU worker. Workers may use half of the memory that is free at the start; each one holds all models."""

_PROBE = run_module("sie.runtime.gpu_probe")
_TO_CPU: Final = "set devices to cpu to serve from the CPU"
_TOO_OLD = (
    "the driver ({driver}) is too old for CUDA {torch_cuda} of torch {torch}: update the driver, or install a "
    "torch that was built for an older CUDA"
)
_NO_FABRIC = (
    "CUDA error 802: the GPUs' fabric does not run: start nvidia-fabricmanager in the driver's version ({driver})"
)
_NO_LIBRARY = (
    "libcuda.so.1 is missing: install the driver's CUDA library; a container needs "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)
_OTHER_LIBRARY = (
    "CUDA error 803: libcuda.so.1 is not of the running driver ({driver}): reboot, or remove CUDA's compat libraries"
)
_REASONS: Final = (
    ("driver on your system is too old", _TOO_OLD),
    ("system not yet initialized", _NO_FABRIC),
    ("no NVIDIA driver", _NO_LIBRARY),
    ("unsupported display driver", _OTHER_LIBRARY),
)
"""Parts of torch's error, and what they mean to an operator."""


class WorkerSlot(msgspec.Struct, frozen=True):
    """One worker to run: its device (`cpu`, `cuda:0`) and the cores it is pinned to (empty: not pinned).

    memory_bytes is a GPU's memory, whoever uses it; 0 if unknown.
    """

    device: str
    cores: tuple[int, ...] = ()
    memory_bytes: int = 0


def resolve_devices(setting: str, timeout_s: float) -> list[WorkerSlot]:
    """Return the worker slots for `setting`: auto, cpu, cpu:N, cuda, or a list such as cuda:0,cuda:1.

    Raises StartError that names the setting if its form is wrong or one of its GPUs is missing, or if `auto` finds GPUs
    that torch cannot use: nobody asked for the CPU then.
    """
    if setting == "auto":
        found = _probe_gpus(timeout_s)
        if found.num_present and not found.num_usable:
            raise StartError(f"devices: {_why_unusable(found)}; {_TO_CPU} on purpose")
        return (
            _gpu_slots(list(range(found.num_usable)), found, timeout_s)
            if found.num_usable
            else _cpu_slots(_count_cpu_workers())
        )
    if match := re.fullmatch(r"cpu(?::([1-9]\d*))?", setting):
        return _cpu_slots(int(match[1]) if match[1] else _count_cpu_workers())
    if not re.fullmatch(r"cuda|cuda:\d+(,cuda:\d+)*", setting):
        raise StartError(f"devices: {setting!r} is none of auto, cpu, cpu:N, cuda, or a list such as cuda:0,cuda:1")
    found = _probe_gpus(timeout_s)
    num_gpus = found.num_usable
    wanted = list(range(num_gpus)) if setting == "cuda" else [int(part[5:]) for part in setting.split(",")]
    missing = [i for i in wanted if i >= num_gpus]
    if missing or not wanted:
        why = f": {_why_unusable(found)}" if found.num_present and not num_gpus else ""
        raise StartError(f"devices: {setting!r} was requested, but this host has {num_gpus} usable CUDA devices{why}")
    if len(set(wanted)) != len(wanted):
        raise StartError(f"devices: {setting!r} names a device twice")
    return _gpu_slots(wanted, found, timeout_s)


def _count_cpu_workers() -> int:
    """Return the number of workers for `cpu`: one per core, limited by memory.

    The remaining cores become threads, and waiting workers lend theirs (`docs/decisions/053-idle-cores-are-lent.md`).
    """
    memory = read_memory()
    num_fitting = len(usable_cores()) if memory is None else memory[1] // 2 // _BYTES_PER_CPU_WORKER
    return max(1, min(len(usable_cores()), num_fitting))


def _cpu_slots(num_workers: int) -> list[WorkerSlot]:
    cores = usable_cores()
    return [WorkerSlot("cpu", share) for share in share_cores(cores, num_workers, read_places(cores))]


def _gpu_slots(indices: list[int], found: GpuProbe, timeout_s: float) -> list[WorkerSlot]:
    cores = usable_cores()
    near = find_near_cores(indices, timeout_s) if len(indices) > 1 else []
    places = read_places(cores)
    shares = share_near(cores, near, places) if near else share_cores(cores, len(indices), places)
    sizes = found.memory_bytes or (0,) * found.num_usable
    return [WorkerSlot(f"cuda:{i}", share, sizes[i]) for i, share in zip(indices, shares, strict=True)]


def _why_unusable(found: GpuProbe) -> str:
    """Return why torch uses none of the GPUs, and the remedy."""
    facts = msgspec.structs.asdict(found)
    if found.torch and not found.torch_cuda:
        why = "torch {torch} is a build without CUDA: install one with CUDA (pip install torch)".format(**facts)
    else:
        texts = [text.format(**facts) for part, text in _REASONS if part in found.error]
        why = texts[0] if texts else found.error or "torch sees none"
    return f"this host has {found.num_present} GPUs that torch cannot use: {' '.join(why.split())}"


def _probe_gpus(timeout_s: float) -> GpuProbe:
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter and module
            _PROBE,
            capture_output=True,
            timeout=timeout_s,
            check=True,
            text=True,
            process_group=0,  # Ctrl-C at a terminal must reach only the supervisor
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=GpuProbe)
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"devices: the GPU driver did not answer within {timeout_s:g} s (resolve_timeout_s); {_TO_CPU}"
        ) from error
    except (subprocess.CalledProcessError, msgspec.MsgspecError, IndexError) as error:
        raise StartError(f"devices: counting GPUs failed: {error}; {_TO_CPU}") from error
