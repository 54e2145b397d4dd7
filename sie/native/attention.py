"""Calls the library's packed attention: defines its struct, and tells whether it supports a shape."""

from __future__ import annotations

import ctypes
from typing import ClassVar

from sie import native

MAX_WIDTH = 512


class AttentionCall(ctypes.Structure):
    """One attention over packed sequences; mirrors `SieAttention` in `src/attention.h`, which documents each field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out")),
        *(
            (f"{tensor}_{part}", ctypes.c_int64)
            for tensor in ("query", "key", "value", "out")
            for part in ("token", "head")
        ),
        ("bounds", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_sequences", "num_heads", "num_key_heads", "width")),
        ("scale", ctypes.c_float),
        ("is_causal", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("bias_reach", ctypes.c_int32),
        ("biases", ctypes.c_void_p),
    ]


def can_attend(*, is_bf16: bool, width: int) -> bool:
    """Tell whether the library computes attention in bfloat16 (else float32) for this head width."""
    return 0 < width <= MAX_WIDTH and width % 2 == 0 and native.computes(is_bf16=is_bf16)


def scratch_bytes(longest: int, width: int, num_threads: int) -> int:
    """Return the bytes that a call needs besides its tensors; longest is the token count of the longest sequence."""
    library = native.loaded()
    library.sie_attention_scratch.restype = ctypes.c_int64
    return num_threads * library.sie_attention_scratch(ctypes.c_int64(longest), ctypes.c_int64(width))


def run_attention(call: AttentionCall, scratch: int, *, is_bf16: bool) -> None:
    """Write the attention that a struct describes to its `out`. scratch is the address of `scratch_bytes` bytes."""
    native.loaded().sie_attend(ctypes.byref(call), ctypes.c_int32(is_bf16), ctypes.c_void_p(scratch))
