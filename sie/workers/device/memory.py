"""Owns what a worker knows of its device's memory, and how memory that nobody uses goes back to it.

Never imports torch: a worker whose models brought it has it in `sys.modules`, and one of stubs has no use for it.
"""

from __future__ import annotations

import gc
import sys

from sie.ipc.messages import MemoryReport
from sie.shm.segment import read_memory


def measure(device: str) -> MemoryReport:
    """Return the memory of `cpu`, `cuda` or `cuda:N`, all processes counted; a total of 0 when it is not known.

    Of a GPU, what torch's allocator keeps and no tensor uses counts as available. Nothing is known of one before a
    model has brought torch.
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
    """Give back what a model took that nobody references any more.

    What lived when a load ended was frozen (`sie.runtime.child_setup.calm_collector`), the model and its cycles with it.
    """
    gc.unfreeze()
    free_cached()
    gc.freeze()


def free_cached() -> None:
    """Give back what is no longer referenced, and what torch's GPU allocator keeps for the next tensors."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
