"""Encodes a NumPy array in msgpack as fragments around its rows.

The fragments are joined once. The rows are not copied before that.

    85                                    map of 5, keys are bin 8 (the SDK looks only for the bytes key `nd`)
    c4 02 "nd"    c3                      true: an array
    c4 04 "type"  a3 "<f4"                str
    c4 04 "kind"  c4 00                   empty bin: plain numbers
    c4 05 "shape" 91 cd 01 80             array of unsigned integers
    c4 04 "data"  c5 06 00 ...            bin, C order

Source: SIE API reference, section 4 (the msgpack-numpy convention).
"""

from __future__ import annotations

import struct
from functools import lru_cache

import msgspec

_ENCODER = msgspec.msgpack.Encoder()
pack = _ENCODER.encode

_MAX_FIXARRAY = 15


def array_header(length: int) -> bytes:
    """Return the header of a msgpack array."""
    if length <= _MAX_FIXARRAY:
        return bytes((0x90 | length,))
    return b"\xdc" + length.to_bytes(2, "big") if length < 1 << 16 else b"\xdd" + length.to_bytes(4, "big")


def bin_header(num_bytes: int) -> bytes:
    """Return the header of a msgpack bin, with the shortest length that fits: 8, 16 or 32 bits."""
    if num_bytes < 1 << 8:
        return b"\xc4" + num_bytes.to_bytes(1, "big")
    return b"\xc5" + struct.pack(">H", num_bytes) if num_bytes < 1 << 16 else b"\xc6" + struct.pack(">I", num_bytes)


@lru_cache(maxsize=256)
def array_prefix(dtype: str, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """Return the part of an array's map before its num_bytes raw bytes.

    dtype is a NumPy code (`<f4`, `<f2`, `|i1`, `|u1`). Cached, because a model has few shapes.
    """
    keys = (_bin(b"nd"), _bin(b"type"), _bin(b"kind"), _bin(b"shape"), _bin(b"data"))
    values = (b"\xc3", pack(dtype), _bin(b""), array_header(len(shape)) + b"".join(map(pack, shape)), b"")
    return b"\x85" + b"".join(key + value for key, value in zip(keys, values, strict=True)) + bin_header(num_bytes)


def _bin(data: bytes) -> bytes:
    return bin_header(len(data)) + data
