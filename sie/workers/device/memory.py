"""Measures a device's memory, and returns unused memory to it, though never while a CUDA graph is captured.

Never imports torch: a worker whose models use it has it in `sys.modules`, and a worker with only stubs does not need
it.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sie.ipc.messages import MemoryReport
from sie.runtime.logs import get_logger
from sie.shm.segment import read_memory
from sie.workers.device.faults import raise_if_lost

_log = get_logger(__name__)


class _Allocator:
    """torch's GPU allocator in this process. A capture holds the lock, because releasing memory beside one fails.

    worn: it releases no memory since a failed capture. Models still run; only a new process repairs it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_deferred = False
        self.worn = False


_allocator = _Allocator()


def measure(device: str) -> MemoryReport:
    """Return the memory of `cpu`, `cuda` or `cuda:N` over all processes; a total of 0 if unknown.

    On a GPU, memory that torch's allocator caches for no tensor counts as available. A GPU's memory is unknown until a
    model has imported torch.
    """
    if device == "cpu":
        return MemoryReport(*(read_memory() or (0, 0)))
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return MemoryReport(0, 0)
    index = int(device.partition(":")[2] or 0)
    free, total = torch.cuda.mem_get_info(index)
    return MemoryReport(total, free + torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index))


def peak_bytes(device: Any, run: Callable[[], object]) -> int:
    """Return the most memory that tensors of a GPU hold while `run` works, beyond those before it. Waits for the device.

    Steps of other models that run meanwhile count, too.
    """
    cuda = sys.modules["torch"].cuda
    cuda.reset_peak_memory_stats(device)
    before = cuda.memory_allocated(device)
    run()
    cuda.synchronize(device)
    return cuda.max_memory_allocated(device) - before


def free_model() -> None:
    """Free the memory of a model that is no longer referenced.

    Objects alive at the end of a load were frozen (`sie.runtime.child_setup.calm_collector`), the model and its cycles
    included.
    """
    gc.unfreeze()
    free_cached()
    gc.freeze()


def free_cached() -> None:
    """Free unreferenced objects, and the memory that torch's GPU allocator caches; during a capture, after its end.

    Never waits for the capture. Raises DeviceLostError if the device is lost.
    """
    gc.collect()
    if not _allocator.lock.acquire(blocking=False):
        _allocator.is_deferred = True
        return
    try:
        _release()
    finally:
        _allocator.lock.release()


@contextmanager
def keeping_cached() -> Iterator[None]:
    """Release no cached memory within the block, which captures a CUDA graph; another thread's block waits.

    Memory that `free_cached` was to release meanwhile is released at the end.
    """
    with _allocator.lock:
        try:
            yield
        finally:
            if _allocator.is_deferred:
                _allocator.is_deferred = False
                _release()


def can_release() -> bool:
    """Return whether the allocator releases memory, after a failed capture. Call it within `keeping_cached`."""
    _release()
    return not _allocator.worn


def wear_out(reason: str) -> None:
    """Let this process end when it is idle, as after a failed capture that could not be undone."""
    if not _allocator.worn:
        _log.error("the GPU's allocator releases no memory any more: %s", reason)
    _allocator.worn = True


def is_worn() -> bool:
    """Return whether the allocator releases no memory, so that this process should end when it is idle."""
    return _allocator.worn


def _release() -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise_if_lost(error)
        wear_out(str(error))
