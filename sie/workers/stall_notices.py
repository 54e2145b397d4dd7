"""Announces stalls of the step loop during loads to the supervisor: their expected length, and their end.

A load runs on a thread beside the loop, but some libraries hold the interpreter lock while they read a large tokenizer
or are imported. On a host without a free core that takes many seconds and would look like a hung worker.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sie.native.preempt import preempted
from sie.runtime import failpoints
from sie.runtime.gil_stalls import seconds_to_read

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_IMPORT_S: Final = 30
"""An import takes 0.4 s of processor time at a stretch, most of it in the dynamic linker."""
_listeners: list[Callable[[int], None]] = []


def set_listener(listener: Callable[[int], None]) -> None:
    """Set the listener. A load's thread calls it with the seconds for which the loop may stall; 0 ends the stall."""
    _listeners[:] = [listener]


@contextmanager
def importing() -> Iterator[None]:
    """Announce a stall during the imports within the block, unless torch is already imported.

    No garbage is collected meanwhile: imports make a million objects to keep, and next to no garbage.
    """
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        with _stalling(_IMPORT_S):
            yield
        gc.freeze()
    finally:
        gc.enable()


@contextmanager
def reading(path: str, library: str = "tokenizers") -> Iterator[None]:
    """Announce a stall while the block reads a tokenizer file, if the file is large, and keep it short.

    Other threads run meanwhile if the compiled library is installed (`sie.native.preempt`).
    """
    with _stalling(seconds_to_read(path)), preempted(library):
        failpoints.reach("load.tokenizer")
        yield


def read_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a file. Raises the library's errors."""
    from tokenizers import Tokenizer  # a worker with only stubs never needs it

    with reading(path):
        return Tokenizer.from_file(path)


@contextmanager
def _stalling(seconds: int) -> Iterator[None]:
    if seconds:
        _notify(seconds)
    try:
        yield
    finally:
        if seconds:
            _notify(0)


def _notify(seconds: int) -> None:
    for listener in _listeners:
        listener(seconds)
