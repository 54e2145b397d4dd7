"""Calls the library's linear layer over packed weights: defines its structs, and packs weights.

`src/linear.h` draws the layout; the `pack_` functions produce it in NumPy, for one matrix at load.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from sie import native

TILE_OUTPUTS = 16
GROUP_INPUTS = 32
NumberT = TypeVar("NumberT", np.uint8, np.uint16)


class WeightFormat(IntEnum):
    """The storage format of a weight."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


class Matrix(ctypes.Structure):
    """A packed matrix; mirrors `SieMatrix` in `src/linear.h`, which documents each field."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weights", "codebook", "bias")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs", "format")),
    ]


class LinearCall(ctypes.Structure):
    """One linear layer; mirrors `SieLinear`."""

    _fields_: ClassVar = [
        ("matrix", Matrix),
        *((name, ctypes.c_void_p) for name in ("input", "output", "scratch")),
        *((name, ctypes.c_int64) for name in ("input_stride", "output_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "is_bf16", "num_threads")),
    ]


def can_multiply(*, is_bf16: bool) -> bool:
    """Tell whether the library computes linear layers with bfloat16 (else float32) inputs."""
    return native.computes(is_bf16=is_bf16)


def scratch_bytes(rows: int, inputs: int, num_threads: int) -> int:
    """Return the scratch bytes, 64-byte aligned, that a call needs besides its tensors."""
    library = native.loaded()
    library.sie_linear_scratch.restype = ctypes.c_int64
    return library.sie_linear_scratch(*(ctypes.c_int64(size) for size in (rows, inputs, num_threads)))


def run_linear(call: LinearCall) -> None:
    """Write the layer's result to its `output`."""
    native.loaded().sie_linear(ctypes.byref(call))


def packed_bytes(outputs: int, inputs: int, form: WeightFormat) -> int:
    """Return the bytes of a packed matrix."""
    groups = -(-outputs // TILE_OUTPUTS) * -(-inputs // GROUP_INPUTS)
    numbers = GROUP_INPUTS * TILE_OUTPUTS
    if form is WeightFormat.BF16:
        return groups * 2 * numbers
    return groups * (2 * TILE_OUTPUTS + (numbers if form is WeightFormat.INT8 else numbers // 2))


def pack_bf16(bits: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """Return the packed bytes of a bfloat16 matrix (outputs, inputs), given as its bits."""
    return _tiles(bits, 2).reshape(-1).view(np.uint8)


def unpack_bf16(packed: NDArray[np.uint8], inputs: int) -> NDArray[np.uint16]:
    """Return the bits (outputs in whole tiles, inputs) of whole tiles that `pack_bf16` made."""
    groups = -(-inputs // GROUP_INPUTS)
    tiles = packed.view(np.uint16).reshape(-1, groups, GROUP_INPUTS // 2, TILE_OUTPUTS, 2)
    return tiles.transpose(0, 3, 1, 2, 4).reshape(-1, groups * GROUP_INPUTS)[:, :inputs]


def pack_int8(numbers: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Return the packed bytes of numbers (outputs, inputs) with scales (outputs, groups) for groups of 32."""
    return _with_scales(_tiles(numbers.view(np.uint8) ^ np.uint8(0x80), 4), scales)


def pack_int4(numbers: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    """Return the packed bytes of codes 0 to 15 (outputs, inputs) with scales (outputs, groups) for groups of 32."""
    quads = _tiles(numbers, 4)
    return _with_scales(quads[:, :, 0::2] | quads[:, :, 1::2] << np.uint8(4), scales)


def _tiles(matrix: NDArray[NumberT], run: int) -> NDArray[NumberT]:
    """Return (tiles, groups, 32 / run, 16 outputs, run inputs), padded with zeros after the last output and input."""
    outputs, inputs = matrix.shape
    padding = -outputs % TILE_OUTPUTS, -inputs % GROUP_INPUTS
    padded = np.pad(matrix, ((0, padding[0]), (0, padding[1]))) if any(padding) else matrix
    # A run has four bytes in each format, and NumPy moves numbers of four bytes in a third of the time of runs.
    words = np.ascontiguousarray(padded).view(np.uint32)
    split = words.reshape(len(words) // TILE_OUTPUTS, TILE_OUTPUTS, -1, GROUP_INPUTS // run)
    return np.ascontiguousarray(split.transpose(0, 2, 3, 1)[..., None]).view(matrix.dtype)


def _with_scales(numbers: NDArray[np.uint8], scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    tiles, groups = numbers.shape[:2]
    padded = np.pad(scales.astype(np.float16), ((0, -len(scales) % TILE_OUTPUTS), (0, 0)))
    columns = padded.reshape(tiles, TILE_OUTPUTS, groups).transpose(0, 2, 1)
    head = np.ascontiguousarray(columns).view(np.uint8)
    return np.concatenate((head, numbers.reshape(tiles, groups, -1)), axis=2).reshape(-1)
