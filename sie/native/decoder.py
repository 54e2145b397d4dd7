"""Runs a whole decoder in the library: defines its structs, with one field for each field of `src/decoder.h`.

Addresses are plain numbers. The caller that fills a struct must keep the memory that it points to alive.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

from sie import native
from sie.native.linear import Matrix


class DecoderLayer(ctypes.Structure):
    """Mirrors `SieDecoderLayer`."""

    _fields_: ClassVar = [
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "before_attention", "after_attention", "before_block", "after_block", "query_norm", "key_norm",
                "cosines", "sines", "keys", "values",
            )
        ),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("is_norm_whole", ctypes.c_int32),
    ]  # fmt: skip


class Screen(ctypes.Structure):
    """Mirrors `SieScreen`."""

    _fields_: ClassVar = [
        (name, ctypes.c_void_p)
        for name in ("tiles", "kept", "input_scales", "scales", "sums", "errors", "lengths", "head_lengths")
    ]


class Decoder(ctypes.Structure):
    """Mirrors `SieDecoder`."""

    _fields_: ClassVar = [
        ("embeddings", ctypes.c_void_p),
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("last_norm", ctypes.c_void_p),
        ("head", Matrix),
        ("screen", Screen),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_layers", "width", "num_heads", "num_key_heads", "head_width", "rotary_width", "activation",
                "is_gated", "block_tokens", "is_bf16",
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_cap", "epsilon")
        ),
    ]  # fmt: skip


class DecoderStep(ctypes.Structure):
    """Mirrors `SieDecoderStep`; slots are rows of four int64, in the layout of `SieSlot`."""

    _fields_: ClassVar = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "ids",
                "blocks",
                "slots",
                "kept",
                "logits",
                "best",
                "hidden",
                "hidden_ends",
                "scratch",
            )
        ),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_slots", "num_kept", "num_threads")),
    ]


def can_decode(*, is_bf16: bool) -> bool:
    """Tell whether the library runs decoders in bfloat16 (else float32)."""
    return native.computes(is_bf16=is_bf16)


def decoder_scratch_bytes(decoder: Decoder, step: DecoderStep) -> int:
    """Return the scratch bytes, 64-byte aligned, that a step needs; its tokens, slots and counts must be filled in."""
    library = native.loaded()
    library.sie_decoder_scratch.restype = ctypes.c_int64
    return library.sie_decoder_scratch(ctypes.byref(decoder), ctypes.byref(step))


def run_decoder(decoder: Decoder, step: DecoderStep) -> None:
    """Run a step. Its ids must be in the vocabulary, its blocks in the layers, its positions in the rotary tables."""
    native.loaded().sie_decode(ctypes.byref(decoder), ctypes.byref(step))
