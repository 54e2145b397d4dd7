"""Calls the library's pooling."""

from __future__ import annotations

import ctypes

from sie import native


def can_pool(*, is_bf16: bool) -> bool:
    """Tell whether the library pools hidden states in bfloat16 (else float32)."""
    return native.computes(is_bf16=is_bf16)


def pool_mean(hidden: int, width: int, bounds: int, num_sequences: int, out: int, *, is_bf16: bool) -> None:
    """Write each sequence's mean to the address out, (num_sequences, width) float32.

    hidden is the address of (t, width) values. bounds is the address of (num_sequences + 1,) int32, the sequences'
    starts and the end.
    """
    native.loaded().sie_pool_mean(
        ctypes.c_void_p(hidden),
        ctypes.c_int32(is_bf16),
        ctypes.c_int64(width),
        ctypes.c_void_p(bounds),
        ctypes.c_int32(num_sequences),
        ctypes.c_void_p(out),
    )
