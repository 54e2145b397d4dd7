"""Measures a device's memory, and returns unused memory to it.

Never imports torch: a worker whose models use it has it in `sys.modules`, and a worker with only stubs does not need
it.
"""

from __future__ import annotations

import gc
import sys

from sie.ipc.messages import MemoryReport
from sie.shm.segment import read_memory


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


def free_model() -> None:
    """Free the memory of a model that is no longer referenced.

    Objects alive at the end of a load were frozen (`sie.runtime.child_setup.calm_collector`), the model and its cycles
    included.
    """
    gc.unfreeze()
    free_cached()
    gc.freeze()


def free_cached() -> None:
    """Free unreferenced objects, and the memory that torch's GPU allocator caches."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
