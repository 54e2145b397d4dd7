"""Runs a whole encoder in the library: defines its structs, and packs weights in the order in which products read them.

Addresses are plain numbers. The caller that fills a struct must keep the memory that it points to alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sie import native
from sie.native import Feature

_PANEL = 32
"""Adjacent columns of a packed weight: `kPanel` in `src/encoder.h`."""
_BYTE_INPUTS = 64
"""The inputs of an 8-bit weight are padded to a multiple of this: `kByteInputs` in `src/products_int8.h`."""
ACTIVATIONS = {"gelu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "relu": 2, "silu": 3, "swish": 3}
"""By the name in a checkpoint's configuration; the numbers are `SieActivation`."""


class Dense(ctypes.Structure):
    """Mirrors `SieDense`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "scales", "sums")),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
    ]


class Norm(ctypes.Structure):
    """Mirrors `SieNorm`."""

    _fields_: ClassVar = [("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class Layer(ctypes.Structure):
    """Mirrors `SieLayer`."""

    _fields_: ClassVar = [
        *((name, Dense) for name in ("qkv", "out", "up", "down")),
        ("after_attention", Norm),
        ("after_block", Norm),
    ]


class Encoder(ctypes.Structure):
    """Mirrors `SieEncoder`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("words", "positions", "types")),
        ("after_embedding", Norm),
        ("layers", ctypes.POINTER(Layer)),
        *((name, ctypes.c_int32) for name in ("num_layers", "width", "num_heads", "activation")),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("widest", ctypes.c_int32),
        ("level", ctypes.c_int32),
    ]


class EncoderStep(ctypes.Structure):
    """Mirrors `SieStep`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "types", "bounds", "seen", "hidden", "scratch")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences", "longest", "num_threads")),
    ]


def choose_level(*, is_bf16: bool, inputs: Iterable[int]) -> int | None:
    """Return the `SieLevel` for encoders in bfloat16 (else float32) on this processor, or None if none fits.

    inputs are the input sizes of all linear layers: an AMX tile holds 32 inputs.
    """
    if not is_bf16:
        return 0 if native.has(Feature.AVX512) else None
    if native.has(Feature.AMX_BF16 | Feature.AVX512_BF16) and all(count % 32 == 0 for count in inputs):
        return 2
    return 1 if native.has(Feature.AVX512_BF16) else None


def choose_int8_level(*, is_bf16: bool) -> int | None:
    """Return the `SieLevel` for encoders with 8-bit weights and all else in bfloat16 (else float32), or None."""
    if not is_bf16:
        return 3 if native.has(Feature.AVX512_VNNI) else None
    if native.has(Feature.AMX_INT8 | Feature.AVX512_BF16):
        return 5
    return 4 if native.has(Feature.AVX512_BF16) else None


def pack_panels(weight: int, outputs: int, inputs: int, *, is_bf16: bool) -> NDArray[np.uint32]:
    """Copy a row-major weight (outputs, inputs) at an address to `Dense.panels` layout, 64-byte aligned."""
    words = inputs // 2 if is_bf16 else inputs
    panels = empty_aligned(-(-outputs // _PANEL) * _PANEL * words * 4).view(np.uint32)
    native.loaded().sie_pack_panels(
        ctypes.c_void_p(weight),
        ctypes.c_int32(is_bf16),
        ctypes.c_int32(outputs),
        ctypes.c_int32(inputs),
        ctypes.c_void_p(panels.ctypes.data),
    )
    return panels


def pack_bytes(numbers: NDArray[np.int8]) -> NDArray[np.uint32]:
    """Return numbers (outputs, inputs) in the same layout: a word holds four, and inputs are padded with zeros."""
    outputs, inputs = numbers.shape
    padded = np.pad(numbers, ((0, -outputs % _PANEL), (0, -inputs % _BYTE_INPUTS)))
    words = padded.reshape(-1, _PANEL, padded.shape[1] // 4, 4).transpose(0, 2, 1, 3)
    panels = empty_aligned(padded.nbytes)
    panels.view(np.int8).reshape(words.shape)[:] = words
    return panels.view(np.uint32)


def pad_panels(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return one number for each output (outputs,), padded with zeros to whole panels, for `Dense.scales`."""
    return np.pad(values, (0, -len(values) % _PANEL))


def encoder_scratch_bytes(encoder: Encoder, num_tokens: int, longest: int, num_threads: int) -> int:
    """Return the scratch bytes that a step of num_tokens tokens needs; longest is its longest sequence's tokens."""
    library = native.loaded()
    library.sie_encoder_scratch.restype = ctypes.c_int64
    sizes = (ctypes.c_int64(size) for size in (num_tokens, longest, num_threads))
    return library.sie_encoder_scratch(ctypes.byref(encoder), *sizes)


def run_encoder(encoder: Encoder, step: EncoderStep) -> None:
    """Run a step; its ids, positions and types must be in the tables."""
    native.loaded().sie_encode(ctypes.byref(encoder), ctypes.byref(step))


def empty_aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Return num_bytes uninitialised bytes at an address that is a multiple of 64."""
    room = np.empty(num_bytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + num_bytes]
