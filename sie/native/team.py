"""Lets a process's compiled steps use cores that other processes lend, and tells a step how many threads it may have.

`src/team.cpp` has the threads. A helper leaves after its piece of work once the core's owner needs the core again.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import ClassVar, Final

from sie import native

_LEAST_WORK: Final = 1 << 27
"""Multiplications of a step that asks for help: about 0.3 ms of one core. Waking a helper may take a tenth of that."""
_FEWEST_ROWS: Final = 8
"""Steps of fewer rows count as so many, because reading the weights takes as long as multiplying them with these."""
_borrowers: Final[set[int]] = set()
"""The thread that may use lent cores, if any. A load beside it measures times, which must not depend on other processes."""


class LentCore(ctypes.Structure):
    """Mirrors `SieLentCore` in `src/team.h`: two addresses of words, and the kernel's number of the core."""

    _fields_: ClassVar = [
        ("is_needed", ctypes.c_void_p),
        ("borrower", ctypes.c_void_p),
        ("number", ctypes.c_int32),
    ]


def borrow(cores: Sequence[LentCore], *, max_lent: int, num_own: int, name: int) -> None:
    """Let this thread's steps use other processes' cores: at most max_lent at once, beside num_own threads of its own.

    name, not 0, is written as the borrower of a core in use. Earlier cores are asked first. Call it once, before any step;
    the words must stay mapped. Does nothing without the compiled library.
    """
    library = native.load()
    if library is None or not cores:
        return
    array = (LentCore * len(cores))(*cores)
    numbers = (ctypes.c_int32(number) for number in (len(cores), max_lent, num_own))
    library.sie_team_borrow(ctypes.byref(array), *numbers, ctypes.c_uint32(name))
    _borrowers.add(threading.get_ident())


def num_threads(own: int, num_weights: int, num_rows: int) -> int:
    """Return the threads of a step that multiplies so many weights with so many rows: own ones, and those on lent cores."""
    if threading.get_ident() not in _borrowers or num_weights * max(num_rows, _FEWEST_ROWS) < _LEAST_WORK:
        return own
    return own + int(native.loaded().sie_team_free_cores())


def saved_ns() -> int:
    """Return the nanoseconds by which lent cores have shortened this thread's steps since the start."""
    if threading.get_ident() not in _borrowers:
        return 0
    saved = native.loaded().sie_team_saved_ns
    saved.restype = ctypes.c_int64
    return int(saved())
