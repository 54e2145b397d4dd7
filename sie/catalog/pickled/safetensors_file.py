"""Writes the tensors of a pickled file as safetensors, piece by piece: never holds more than one tensor in memory.

Source: safetensors' format: eight bytes of length, a header in JSON, and the tensors' bytes without gaps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from sie.catalog.pickled.program import Refused
from sie.catalog.pickled.torch_file import DTYPE_BYTES, Slab

_PIECE_BYTES: Final = 16 << 20
_ALIGNMENT: Final = 8
_METADATA: Final = "__metadata__"


def write_safetensors(source: Path, slabs: Mapping[str, Slab], target: Path, on_bytes: Callable[[int], object]) -> None:
    """Write a new file `target` with these tensors of `source`. on_bytes gets the number of bytes of each piece.

    The file is on the disk when this returns. Raises FileExistsError if there is a target, other OSErrors, and Refused
    for a source that is cut meanwhile.
    """
    if _METADATA in slabs:
        raise Refused(f"a tensor has the name {_METADATA!r}, which safetensors keeps for itself")
    # Eight bytes before four and so on, so that every tensor begins at a multiple of its values' size.
    names = sorted(slabs, key=lambda name: (-DTYPE_BYTES[slabs[name].dtype], name))
    with source.open("rb") as reader, target.open("xb") as writer:
        writer.write(_header(names, slabs))
        for name in names:
            _copy(reader, slabs[name], writer, on_bytes)
        writer.flush()
        os.fsync(writer.fileno())


def _header(names: list[str], slabs: Mapping[str, Slab]) -> bytes:
    header: dict[str, object] = {_METADATA: {"format": "pt"}}
    position = 0
    for name in names:
        slab = slabs[name]
        end = position + slab.num_bytes
        header[name] = {"dtype": slab.dtype, "shape": slab.shape, "data_offsets": (position, end)}
        position = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _copy(reader: BinaryIO, slab: Slab, writer: BinaryIO, on_bytes: Callable[[int], object]) -> None:
    reader.seek(slab.start)
    if slab.num_bytes and not slab.is_contiguous:
        rows = _read(reader, slab.span_bytes)
        writer.write(_gather(rows, slab))
        on_bytes(slab.num_bytes)
        return
    left = slab.num_bytes
    while left:
        piece = _read(reader, min(left, _PIECE_BYTES))
        writer.write(piece)
        on_bytes(len(piece))
        left -= len(piece)


def _gather(data: bytes, slab: Slab) -> bytes:
    """Return the values of a tensor in their own order, from a storage where they lie in another, such as transposed."""
    import numpy as np  # few files need it

    width = DTYPE_BYTES[slab.dtype]
    values = np.frombuffer(data, dtype=f"V{width}")
    # A dimension of size 1 may have any stride, which the file's size does not bound.
    strides = [stride * width if size > 1 else 0 for size, stride in zip(slab.shape, slab.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(values, slab.shape, strides, writeable=False).tobytes()


def _read(reader: BinaryIO, size: int) -> bytes:
    data = reader.read(size)
    if len(data) != size:
        raise Refused("it was cut while it was read")
    return data
