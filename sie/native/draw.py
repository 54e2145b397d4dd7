"""Draws tokens from rows of logits in the library: defines its struct, with one field for each field of `src/draw.h`.

Addresses are plain numbers. The caller that fills a struct must keep the memory that it points to alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

from sie import native
from sie.native import Feature
from sie.native.encoder import empty_aligned


class Draw(ctypes.Structure):
    """Mirrors `SieDraw`."""

    _fields_: ClassVar = [
        ("logits", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("number", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("top_k", "num_hidden", "vocabulary", "token")),
    ]


def can_draw() -> bool:
    """Tell whether the library draws tokens on this processor."""
    return native.has(Feature.AVX2)


def draw_tokens(draws: Sequence[Draw], num_threads: int) -> list[int]:
    """Return the token of each draw, at least one, over the same vocabulary; -1 where logits are not finite."""
    library = native.loaded()
    library.sie_draw_scratch.restype = ctypes.c_int64
    scratch = empty_aligned(num_threads * library.sie_draw_scratch(ctypes.c_int64(draws[0].vocabulary)))
    array = (Draw * len(draws))(*draws)
    library.sie_draw(array, ctypes.c_int64(len(draws)), ctypes.c_void_p(scratch.ctypes.data), num_threads)
    return [draw.token for draw in array]
