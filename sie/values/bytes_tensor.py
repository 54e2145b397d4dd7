"""Frames and splits the elements of a BYTES tensor: each is its length as uint32, little-endian, then its bytes.

Elements have no padding. Pure; never trusts a declared number of elements.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

_LENGTH: Final = struct.Struct("<I")


class FramingError(ValueError):
    """The bytes are not whole elements; part names the incomplete piece, in the words of the protocols' servers."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"incomplete string {part}, {reason}")
        self.part = part
        self.reason = reason


def frame_elements(elements: Iterable[bytes]) -> bytes:
    """Return the bytes of a BYTES tensor with these elements, one after another."""
    pieces: list[bytes] = []
    for element in elements:
        pieces.append(_LENGTH.pack(len(element)))
        pieces.append(element)
    return b"".join(pieces)


def split_elements(data: memoryview | bytes) -> list[bytes]:
    """Return copies of the elements of a BYTES tensor. Raises FramingError."""
    return [bytes(data[start:end]) for start, end in element_bounds(data)]


def element_bounds(data: memoryview | bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each element of a BYTES tensor, without its length. Raises FramingError."""
    position, size = 0, len(data)
    while position < size:
        start = position + _LENGTH.size
        if start > size:
            raise FramingError("length indicator", f"expecting 4 bytes but only {size - position} bytes available")
        length: int = _LENGTH.unpack_from(data, position)[0]
        position = start + length
        if position > size:
            raise FramingError("data", f"expecting string of length {length} but only {size - start} bytes available")
        yield start, position
