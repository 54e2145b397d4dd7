"""Calls the library's root mean square norm: defines its struct, and tells whether it supports a format."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from sie import native


class NormCall(ctypes.Structure):
    """Norms of many rows; mirrors `SieRmsNorm` in `src/norm.h`, which documents each field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("input", "weight", "output")),
        *((name, ctypes.c_int64) for name in ("input_outer", "input_inner", "output_outer", "output_inner")),
        *((name, ctypes.c_int32) for name in ("outer", "inner", "width", "is_bf16")),
        ("epsilon", ctypes.c_float),
    ]


def can_normalise(*, is_bf16: bool) -> bool:
    """Tell whether the library computes norms in bfloat16 (else float32)."""
    return native.computes(is_bf16=is_bf16)


def run_norm(call: NormCall) -> None:
    """Normalise the rows of a call, and write the results to its `output`."""
    native.loaded().sie_normalise(ctypes.byref(call))
