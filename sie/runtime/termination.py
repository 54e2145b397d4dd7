"""Lets SIGTERM end the main thread in order, where no loop handles signals."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def ended_by_sigterm(status: int) -> Generator[None]:
    """Within the block, SIGTERM runs the cleanups and ends this process with the status, as Ctrl-C does with its own."""

    def leave(_number: int, _frame: object) -> None:
        sys.exit(status)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
