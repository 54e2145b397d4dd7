"""Loads the library of compiled kernels once for all callers, and tells what the processor can do.

The library is optional. Without it (`load` returns None), or where the processor lacks what a kernel needs (`has`), callers
do the same in torch; both ways pass the same tests. Its functions take plain pointers and sizes, and are called without
the interpreter lock. Standard library only; `sie.native.build` compiles it.
"""

from __future__ import annotations

import ctypes
import enum
from functools import lru_cache

from sie.native.build import SHARED_LIBRARY, digest
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
_is_allowed = True


class Feature(enum.IntFlag):
    """What a kernel may need of the processor and the system. Mirrors `src/features.h`."""

    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 4
    AVX512_VNNI = 8
    AMX_BF16 = 16
    AMX_INT8 = 32


def allow(*, allowed: bool) -> None:
    """Say, for this process, whether the library may be used (setting `native_kernels`). Call it before any `load`."""
    global _is_allowed
    _is_allowed = allowed


def load() -> ctypes.CDLL | None:
    """Return the library, None when it is not allowed, not built, or built from other sources than those beside it."""
    return _load() if _is_allowed else None


def loaded() -> ctypes.CDLL:
    """Return the library where it is known to be there: `has` was asked."""
    library = load()
    assert library is not None
    return library


def has(feature: Feature) -> bool:
    """Tell whether the library is there and may use all of these."""
    return load() is not None and feature in _features()


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(SHARED_LIBRARY))
    except OSError as error:
        _log.info("no compiled kernels (%s): torch does everything", error)
        return None
    library.sie_native_digest.restype = ctypes.c_char_p
    if library.sie_native_digest().decode() != digest():
        _log.warning("%s was built from other sources; `python -m sie.native` builds it anew", SHARED_LIBRARY.name)
        return None
    return library


@lru_cache(maxsize=1)
def _features() -> Feature:
    library = _load()
    return Feature(0) if library is None else Feature(library.sie_native_features())
