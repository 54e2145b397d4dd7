"""Lets other threads run while a thread is in compiled code of a library that keeps the interpreter lock for seconds.

`tokenizers` and `llguidance` read a large vocabulary under the lock, in Rust code that uses no Python objects. A timer
interrupts the thread there, and it releases the lock for a moment (`src/preempt.cpp`, docs/decisions/026). Without the
compiled library this does nothing. Must not be used around a library that works on Python objects.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

from sie.native import load

_MODULES: Final = {"tokenizers": "tokenizers.tokenizers", "llguidance": "llguidance._lib"}
_lock = threading.Lock()


@contextmanager
def preempted(library: str) -> Iterator[None]:
    """Preempt this thread within the block, in the code of `tokenizers` or `llguidance`. Do not nest such blocks."""
    native = _allowed(library)
    if native is None or native.sie_preempt_begin():
        yield
        return
    try:
        yield
    finally:
        native.sie_preempt_end()


def free(objects: list[Any]) -> None:
    """Free a list's objects, which takes a third of the time of reading them. Call it on a thread beside the loop."""
    with preempted("tokenizers"):
        objects.clear()


def _allowed(library: str) -> Any:
    with _lock:
        return _allow(library)


@lru_cache
def _allow(library: str) -> Any:
    """Return our compiled library, set to preempt threads in the given library, or None if it cannot."""
    native = load()
    path = importlib.import_module(_MODULES[library]).__file__ or ""
    return native if native is not None and native.sie_preempt_allow(path.encode()) else None
