"""Turns the setting `devices` into one worker slot per device. Counts GPUs in a helper process with a time limit."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import msgspec

from sie.shm.segment import read_memory
from sie.supervisor.core_shares import read_places, share_cores, share_near
from sie.supervisor.gpu_cores import find_near_cores
from sie.supervisor.host_resources import StartError, usable_cores

_BYTES_PER_CPU_WORKER = 2 << 30
"""Memory per CPU worker. Workers may use half of the memory that is free at the start; each one holds all models."""

_PROBE = """
import json
def count():
    try:
        import pynvml
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount() == 0:
            return 0
    except Exception:
        return 0
    import torch
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps(count()))
"""
# NVML says in milliseconds whether a GPU exists; torch is imported only then.


class WorkerSlot(msgspec.Struct, frozen=True):
    """One worker to run: its device (`cpu`, `cuda:0`) and the cores it is pinned to (empty: not pinned)."""

    device: str
    cores: tuple[int, ...] = ()


def resolve_devices(setting: str, timeout_s: float) -> list[WorkerSlot]:
    """Return the worker slots for `setting`: auto, cpu, cpu:N, cuda, or a list such as cuda:0,cuda:1.

    Raises StartError that names the setting if its form is wrong or one of its GPUs is missing.
    """
    if setting == "auto":
        num_gpus = _count_gpus(timeout_s)
        return _gpu_slots(list(range(num_gpus)), timeout_s) if num_gpus else _cpu_slots(_count_cpu_workers())
    if match := re.fullmatch(r"cpu(?::([1-9]\d*))?", setting):
        return _cpu_slots(int(match[1]) if match[1] else _count_cpu_workers())
    if not re.fullmatch(r"cuda|cuda:\d+(,cuda:\d+)*", setting):
        raise StartError(f"devices: {setting!r} is none of auto, cpu, cpu:N, cuda, or a list such as cuda:0,cuda:1")
    num_gpus = _count_gpus(timeout_s)
    wanted = list(range(num_gpus)) if setting == "cuda" else [int(part[5:]) for part in setting.split(",")]
    missing = [i for i in wanted if i >= num_gpus]
    if missing or not wanted:
        raise StartError(f"devices: {setting!r} was requested, but this host has {num_gpus} usable CUDA devices")
    if len(set(wanted)) != len(wanted):
        raise StartError(f"devices: {setting!r} names a device twice")
    return _gpu_slots(wanted, timeout_s)


def _count_cpu_workers() -> int:
    """Return the number of workers for `cpu`: one per core, limited by memory.

    The remaining cores become threads (`docs/decisions/017-a-cpu-worker-for-each-core.md`).
    """
    memory = read_memory()
    num_fitting = len(usable_cores()) if memory is None else memory[1] // 2 // _BYTES_PER_CPU_WORKER
    return max(1, min(len(usable_cores()), num_fitting))


def _cpu_slots(num_workers: int) -> list[WorkerSlot]:
    cores = usable_cores()
    return [WorkerSlot("cpu", share) for share in share_cores(cores, num_workers, read_places(cores))]


def _gpu_slots(indices: list[int], timeout_s: float) -> list[WorkerSlot]:
    cores = usable_cores()
    near = find_near_cores(indices, timeout_s) if len(indices) > 1 else []
    places = read_places(cores)
    shares = share_near(cores, near, places) if near else share_cores(cores, len(indices), places)
    return [WorkerSlot(f"cuda:{i}", share) for i, share in zip(indices, shares, strict=True)]


def _count_gpus(timeout_s: float) -> int:
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter and text
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            timeout=timeout_s,
            check=True,
            text=True,
            process_group=0,  # Ctrl-C at a terminal must reach only the supervisor
        )
        return int(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"devices: the GPU driver did not answer within {timeout_s:g} s (resolve_timeout_s); "
            "set devices to cpu to start without GPUs"
        ) from error
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise StartError(f"devices: counting GPUs failed: {error}; set devices to cpu to start without GPUs") from error
