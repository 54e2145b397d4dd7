"""Runs a whole encoder in the library: defines its structs, and packs weights in the order in which products read them.

Addresses are plain numbers. The caller that fills a struct must keep the memory that it points to alive.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from sie import native
from sie.native import Feature

_PANEL = 32
"""Adjacent columns of a packed weight: `kPanel` in `src/encoder.h`."""
_BYTE_INPUTS = 64
"""The inputs of an 8-bit weight are padded to a multiple of this: `kByteInputs` in `src/products_int8.h`."""
_HUGE_PAGE = 2 << 20
_CHUNK_BYTES = 16 << 20
ACTIVATIONS = {"gelu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "relu": 2, "silu": 3, "swish": 3}
"""By the name in a checkpoint's configuration; the numbers are `SieActivation`."""


class Level(IntEnum):
    """The instructions that an encoder runs on: `SieLevel` in `src/encoder.h`. INT8 levels have 8-bit weights."""

    F32_AVX2 = 0
    F32 = 1
    BF16 = 2
    AMX = 3
    INT8_F32 = 4
    INT8_BF16 = 5
    INT8_AMX = 6


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
        *(
            (name, Norm)
            for name in (
                "before_attention", "of_attention", "after_attention", "before_block", "of_block", "after_block", "query",
                "key",
            )
        ),
        ("biases", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("window", "is_causal", "is_norm_whole")),
    ]  # fmt: skip


class Encoder(ctypes.Structure):
    """Mirrors `SieEncoder`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("words", "positions", "types")),
        ("after_embedding", Norm),
        ("last", Norm),
        ("layers", ctypes.POINTER(Layer)),
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_layers", "width", "num_heads", "num_key_heads", "head_width", "rotary_width", "inner", "activation",
                "is_gated", "is_rms", "level", "bias_reach",
            )
        ),
        *((name, ctypes.c_float) for name in ("epsilon", "embedding_scale", "residual_scale")),
    ]  # fmt: skip


class EncoderStep(ctypes.Structure):
    """Mirrors `SieStep`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "types", "bounds", "seen", "hidden", "scratch")),
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_sequences", "longest", "num_threads")),
    ]


def choose_level(*, is_bf16: bool, inputs: Iterable[int]) -> Level | None:
    """Return the level for encoders in bfloat16 (else float32) on this processor, or None if none fits.

    inputs are the input sizes of all linear layers: an AMX tile holds 32 inputs.
    """
    if not is_bf16:
        if native.has(Feature.AVX512):
            return Level.F32
        return Level.F32_AVX2 if native.has(Feature.AVX2) else None
    if native.has(Feature.AMX_BF16 | Feature.AVX512_BF16) and all(count % 32 == 0 for count in inputs):
        return Level.AMX
    return Level.BF16 if native.has(Feature.AVX512_BF16) else None


def choose_int8_level(*, is_bf16: bool) -> Level | None:
    """Return the level for encoders with 8-bit weights and all else in bfloat16 (else float32), or None."""
    if not is_bf16:
        return Level.INT8_F32 if native.has(Feature.AVX512_VNNI) else None
    if native.has(Feature.AMX_INT8 | Feature.AVX512_BF16):
        return Level.INT8_AMX
    return Level.INT8_BF16 if native.has(Feature.AVX512_BF16) else None


class WeightRoom:
    """Memory for a model's packed weights, in huge pages where the system has them.

    Products with few rows read each weight once: with pages of 4 KiB they take a tenth longer.
    """

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return num_bytes uninitialised bytes at an address that is a multiple of 64, which live as long as the array."""
        if len(self._rest) < num_bytes:
            size = max(_CHUNK_BYTES, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE)
            room = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError, AttributeError):  # without huge pages the same memory is slower
                room.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(room, np.uint8)
            start = -whole.ctypes.data % _HUGE_PAGE
            self._rest = whole[start : start + size]
        taken, self._rest = self._rest[:num_bytes], self._rest[-(-num_bytes // 64) * 64 :]
        return taken


def pack_panels(weight: int, outputs: int, inputs: int, room: WeightRoom, *, is_bf16: bool) -> NDArray[np.uint32]:
    """Copy a row-major weight (outputs, inputs) at an address to `Dense.panels` layout, in the room."""
    words = inputs // 2 if is_bf16 else inputs
    panels = room.take(-(-outputs // _PANEL) * _PANEL * words * 4).view(np.uint32)
    native.loaded().sie_pack_panels(
        ctypes.c_void_p(weight),
        ctypes.c_int32(outputs),
        ctypes.c_int32(words),
        ctypes.c_void_p(panels.ctypes.data),
    )
    return panels


def pack_bytes(numbers: NDArray[np.int8], room: WeightRoom) -> NDArray[np.uint32]:
    """Copy numbers (outputs, inputs) to the same layout: a word holds four, and inputs are padded with zeros."""
    outputs, inputs = numbers.shape
    padded = np.pad(numbers, ((0, -outputs % _PANEL), (0, -inputs % _BYTE_INPUTS)))
    words = padded.reshape(-1, _PANEL, padded.shape[1] // 4, 4).transpose(0, 2, 1, 3)
    panels = room.take(padded.nbytes)
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
