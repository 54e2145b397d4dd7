"""Lays out requests and replies as bytes, and reads them: prologue, header, aligned arrays.

    header, payload = read_extent(reply.view, decoder)
    array_view(payload, header.arrays[0])

An `ArrayRef` is relative to the payload, which begins at the first 64-byte multiple after the header (`sie.shm.layout`
draws it, `sie.shm.extent` writes it). Another process may have written the bytes. So the header is copied first and
then checked: the writer cannot change the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.values.errors import ProtocolError
from sie.values.work import ArrayRef

PROLOGUE_BYTES: Final = 16
PROLOGUE: Final = Struct("<B3xI8x")
assert PROLOGUE.size == PROLOGUE_BYTES

REPLY_TIMES: Final = Struct("<3q")
"""The `times` of a reply: `sie.values.work.ReplyHeader`."""

MAX_HEADER_BYTES: Final = 1 << 20
MAX_DIMENSIONS: Final = 8

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    code: np.dtype(code)
    for code in ("|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8")
}
"""Element types that may be sent between processes, by NumPy code: plain numbers, never objects."""

HeaderT = TypeVar("HeaderT")


class ArrayPlan(NamedTuple):
    """The places of arrays: one ref for each, and the payload's bytes up to the end of the last array."""

    refs: tuple[ArrayRef, ...]
    nbytes: int


def plan_arrays(arrays: Iterable[tuple[str, str, tuple[int, ...]]]) -> ArrayPlan:
    """Place arrays, each a (name, dtype, shape), one after another; dtype is a key of DTYPES."""
    refs: list[ArrayRef] = []
    end = 0
    for name, dtype, shape in arrays:
        offset = (end + 63) & ~63
        end = offset + DTYPES[dtype].itemsize * prod(shape)
        refs.append(ArrayRef(name, dtype, shape, offset))
    return ArrayPlan(tuple(refs), end)


def extent_bytes(header_bytes: int, payload_bytes: int) -> int:
    """Return the bytes to lease for a header and a payload of these sizes."""
    return ((PROLOGUE_BYTES + header_bytes + 63) & ~63) + payload_bytes


def extent_head(header: bytes) -> bytes:
    """Return the first bytes of an extent: prologue (not cancelled) and header.

    Raises ValueError as `begin_extent` does.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes")
    return PROLOGUE.pack(0, len(header)) + header


def split_extent(view: memoryview) -> tuple[bytes, memoryview]:
    """Return a copy of the header's bytes and the payload's view of an extent that a peer wrote. Raises ProtocolError."""
    total = len(view)
    if total < PROLOGUE_BYTES:
        raise ProtocolError(f"an extent of {total} bytes has no prologue")
    header_bytes: int = PROLOGUE.unpack_from(view)[1]
    end = PROLOGUE_BYTES + header_bytes
    if end > total or header_bytes > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {header_bytes} bytes in an extent of {total} bytes")
    # A copy, because a parser must not read bytes that a peer may change meanwhile.
    return view[PROLOGUE_BYTES:end].tobytes(), view[(end + 63) & ~63 :]


def read_extent(view: memoryview, decoder: msgspec.msgpack.Decoder[HeaderT]) -> tuple[HeaderT, memoryview]:
    """Return the header and the payload's view of an extent that a peer wrote. Raises ProtocolError."""
    header, payload = split_extent(view)
    return decode_header(header, decoder), payload


def decode_header(header: bytes, decoder: msgspec.msgpack.Decoder[HeaderT]) -> HeaderT:
    """Decode the header bytes from `split_extent`. Raises ProtocolError."""
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a header that cannot be decoded: {type(error).__name__}") from error


def array_view(payload: memoryview, ref: ArrayRef) -> NDArray[Any]:
    """Return the array of ref, without a copy; it is read-only if payload is.

    It aliases the extent and is valid only while the lease is. Raises ProtocolError when the ref is not inside the
    payload, is not aligned, or has a dtype that is not in DTYPES.
    """
    dtype = DTYPES.get(ref.dtype)
    if dtype is None or len(ref.shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"an array of {len(ref.shape)} dimensions and dtype {ref.dtype[:16]!r}")
    count = 1
    for size in ref.shape:
        if size < 0:
            raise ProtocolError(f"an array with a dimension of {size}")
        count *= size
    offset = ref.offset
    if offset < 0 or offset & 63 or offset + count * dtype.itemsize > len(payload):
        raise ProtocolError(f"an array of shape {ref.shape} at {offset} in a payload of {len(payload)} bytes")
    try:
        if not count:
            return np.empty(ref.shape, dtype)
        # frombuffer instead of ndarray(buffer=...): only it prevents closing the mapping while the array exists.
        flat = np.frombuffer(payload, dtype, count, offset)
        return flat if len(ref.shape) == 1 else flat.reshape(ref.shape)
    except ValueError as error:
        raise ProtocolError(f"an array of shape {ref.shape}") from error
