"""Owns the choice between the event loop and a thread for work on bytes: many would keep the loop too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

LARGE_BYTES: Final = 64 * 1024
"""From here bodies are decoded, and replies encoded and compressed, on a thread."""


async def offload(pool: ThreadPoolExecutor, nbytes: int, work: Callable[..., Any], *args: Any) -> Any:
    """Do work on so many bytes here and now, or on a thread of the pool when they are many."""
    if nbytes < LARGE_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
