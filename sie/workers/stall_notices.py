"""Owns the announcements of a worker's loads to the supervisor: for how long the step loop may stand still, and its end.

A load runs on a thread beside the loop, but some libraries keep the interpreter lock while they read a large tokenizer
or are imported. On a host without a free core that takes many seconds, and would look like a worker that hangs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from sie.runtime import failpoints
from sie.runtime.gil_stalls import seconds_to_read

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_IMPORT_S: Final = 30
"""0.4 s of processor time at a stretch, most of it the dynamic linker's."""
_listeners: list[Callable[[int], None]] = []


def tell(listener: Callable[[int], None]) -> None:
    """Have listener told, from a load's thread, for how many seconds the loop may stand still; 0: that is over."""
    _listeners[:] = [listener]


@contextmanager
def importing() -> Iterator[None]:
    """Say, unless torch is there already, that libraries are imported within the block."""
    with _standing_still(0 if "torch" in sys.modules else _IMPORT_S):
        yield


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Say, if it is large, that a tokenizer's file is read within the block."""
    with _standing_still(seconds_to_read(path)):
        failpoints.reach("load.tokenizer")
        yield


def read_tokenizer(path: str) -> Tokenizer:
    """Return the tokenizer of a file. Raises what the library raises."""
    from tokenizers import Tokenizer  # a worker of stubs never needs it

    with reading(path):
        return Tokenizer.from_file(path)


@contextmanager
def _standing_still(seconds: int) -> Iterator[None]:
    if seconds:
        _say(seconds)
    try:
        yield
    finally:
        if seconds:
            _say(0)


def _say(seconds: int) -> None:
    for listener in _listeners:
        listener(seconds)
