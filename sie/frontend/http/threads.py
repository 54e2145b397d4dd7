"""Runs work on large bodies in a thread, because it would block the event loop for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

LARGE_BYTES: Final = 64 * 1024
"""Bodies of this size and more are decoded, encoded and compressed in a thread."""


async def offload(pool: ThreadPoolExecutor, nbytes: int, work: Callable[..., Any], *args: Any) -> Any:
    """Run work(*args), in a thread of the pool if it handles LARGE_BYTES or more."""
    if nbytes < LARGE_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)
