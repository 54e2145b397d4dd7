"""Loads the library of compiled kernels once for all callers, and reports the processor's features.

The library is optional. Without it (`load` returns None), or without the features that a kernel needs (`has`), callers
compute the same in torch. Both ways pass the same tests. The library's functions take plain pointers and sizes, and run
without the interpreter lock. Standard library only; `sie.native.build` compiles it.
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
    """Features of the processor and the system that a kernel may need. Mirrors `src/features.h`."""

    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 4
    AVX512_VNNI = 8
    AMX_BF16 = 16
    AMX_INT8 = 32


def allow(*, allowed: bool) -> None:
    """Set whether this process may use the library (setting `native_kernels`). Call it before any `load`."""
    global _is_allowed
    _is_allowed = allowed


def limit(allowed: int) -> int:
    """Let this process use these features only, and return the last limit. A test runs an older processor's kernels so."""
    before = loaded().sie_native_limit(ctypes.c_int32(allowed))
    _features.cache_clear()
    return before


def load() -> ctypes.CDLL | None:
    """Return the library, or None if it is not allowed, not built, or not built from the current sources."""
    return _load() if _is_allowed else None


def loaded() -> ctypes.CDLL:
    """Return the library, which must be available: call `has` first."""
    library = load()
    assert library is not None
    return library


def has(feature: Feature) -> bool:
    """Tell whether the library is available and may use all of these features."""
    return load() is not None and feature in _features()


def computes(*, is_bf16: bool) -> bool:
    """Tell whether the library computes in bfloat16 (else float32) on this processor."""
    return has(Feature.AVX512_BF16 if is_bf16 else Feature.AVX2)


def features() -> Feature:
    """Return the features that kernels may use; none without the library."""
    return Feature(0) if load() is None else _features()


def missing() -> str:
    """Return why this installation has no library that can be used, or an empty text if it has one."""
    found = _open()
    return found if isinstance(found, str) else ""


@lru_cache(maxsize=1)
def _load() -> ctypes.CDLL | None:
    found = _open()
    if not isinstance(found, str):
        return found
    if SHARED_LIBRARY.exists():  # it was built here once, so somebody expects it
        _log.warning("%s; torch computes everything; `python -m sie.native` rebuilds it", found)
    else:
        _log.info("no compiled kernels (%s): torch computes everything", found)
    return None


def _open() -> ctypes.CDLL | str:
    """Return the library, or why it cannot be used."""
    try:
        library = ctypes.CDLL(str(SHARED_LIBRARY))
    except OSError as error:
        return str(error)
    library.sie_native_digest.restype = ctypes.c_char_p
    if library.sie_native_digest().decode() != digest():
        return f"{SHARED_LIBRARY.name} was built from other sources"
    return library


@lru_cache(maxsize=1)
def _features() -> Feature:
    library = _load()
    return Feature(0) if library is None else Feature(library.sie_native_features())
