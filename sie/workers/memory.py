"""Owns what a worker knows of its device's memory, and how memory that nobody uses goes back to it.

Never imports torch: a worker whose models brought it has it in `sys.modules`, and one of stubs has no use for it.
"""

from __future__ import annotations

import gc
import sys


def free_cached() -> None:
    """Give back what is no longer referenced, and what torch's GPU allocator keeps for the next tensors."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
