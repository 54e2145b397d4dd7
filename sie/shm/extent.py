"""Writes and reads an extent: prologue with cancel byte and stop bits, typed header, aligned arrays.

Writing existing arrays:                     plan = plan_arrays([("token_ids", "<i4", (t,)), ...])
                                              length = write_extent(lease.view, encode(header), plan.refs, arrays)
Writing in place, without a copy:            payload = begin_extent(lease.view, encode(header))
                                              array_view(payload, plan.refs[0])[:] = ...
Reading:                                     header, payload = read_extent(attachment.view(descriptor), decoder)
                                              array_view(payload, header.arrays[0])

An `ArrayRef` is relative to the payload, which begins at the first 64-byte multiple after the header. So refs can be
part of the header, whose size decides where the payload begins. A peer's data is checked here, in copies that the peer
cannot change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.shm.extent_headers import ArrayRef
from sie.shm.layout import PROLOGUE, PROLOGUE_BYTES, ProtocolError, round_up

MAX_HEADER_BYTES: Final = 1 << 20
MAX_DIMENSIONS: Final = 8
_STOPPED_AT: Final = 8

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
        offset = round_up(end)
        end = offset + DTYPES[dtype].itemsize * prod(shape)
        refs.append(ArrayRef(name, dtype, shape, offset))
    return ArrayPlan(tuple(refs), end)


def extent_bytes(header_bytes: int, payload_bytes: int) -> int:
    """Return the bytes to lease for a header and a payload of these sizes."""
    return round_up(PROLOGUE_BYTES + header_bytes) + payload_bytes


def begin_extent(view: memoryview, header: bytes) -> memoryview:
    """Write prologue (not cancelled) and header; return the writable payload, 64-byte aligned, up to view's end.

    Raises ValueError when view is too small or header is over MAX_HEADER_BYTES.
    """
    end = PROLOGUE_BYTES + len(header)
    start = (end + 63) & ~63
    if start > len(view) or len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes does not fit in an extent of {len(view)} bytes")
    PROLOGUE.pack_into(view, 0, 0, len(header))
    view[PROLOGUE_BYTES:end] = header
    return view[start:]


def write_extent(view: memoryview, header: bytes, refs: Sequence[ArrayRef], arrays: Sequence[NDArray[Any]]) -> int:
    """Write a whole extent and return its length, for the descriptor.

    refs are from the `plan_arrays` call that made the header; arrays are in the same order. Raises ValueError for an
    array that is not C-contiguous, or not of the planned shape and dtype.
    """
    payload = begin_extent(view, header)
    end = 0
    for ref, array in zip(refs, arrays, strict=True):
        if array.dtype != DTYPES[ref.dtype] or array.shape != ref.shape:
            raise ValueError(f"array {ref.name!r} is {array.dtype} {array.shape}, planned as {ref.dtype} {ref.shape}")
        nbytes = array.nbytes
        end = ref.offset + nbytes
        if nbytes:
            payload[ref.offset : end] = array.data.cast("B")
    return len(view) - len(payload) + end


def extent_head(header: bytes) -> bytes:
    """Return the first bytes of an extent: prologue (not cancelled) and header.

    Raises ValueError as `begin_extent` does.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(header)} bytes")
    return PROLOGUE.pack(0, len(header)) + header


def write_parts(view: memoryview, head: bytes, places: Sequence[slice], parts: Sequence[bytes | memoryview]) -> None:
    """Write a whole extent from arrays as bytes; head is from `extent_head`, places are the arrays' slices.

    Raises ValueError for a part whose length differs from its place.
    """
    view[: len(head)] = head
    for place, part in zip(places, parts, strict=True):
        view[place] = part


def write_pieces(
    view: memoryview, header: bytes, refs: Sequence[ArrayRef], arrays: Sequence[NDArray[Any]], piece_bytes: int
) -> Iterator[None]:
    """Write a whole extent as `write_extent` does; yield after each piece of at most piece_bytes."""
    payload = begin_extent(view, header)
    for ref, array in zip(refs, arrays, strict=True):
        assert (array.shape, array.dtype.str) == (ref.shape, ref.dtype)
        data = array.reshape(-1).view(np.uint8).data
        for start in range(0, array.nbytes, piece_bytes):
            part = data[start : start + piece_bytes]
            payload[ref.offset + start : ref.offset + start + len(part)] = part
            yield


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
    return bytes(view[PROLOGUE_BYTES:end]), view[(end + 63) & ~63 :]


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


def set_cancelled(view: memoryview) -> None:
    """Ask the peer not to run this extent. Only the extent's owner writes, before the lease ends."""
    view[0] = 1


def is_cancelled(view: memoryview) -> bool:
    """Whether the owner of this extent has cancelled it; has no effect after its step is planned."""
    return view[0] != 0


def set_stopped(view: memoryview, choice: int) -> None:
    """Ask the peer to stop generating a choice, 0 to 63. Only the extent's owner writes, before the lease ends."""
    view[_STOPPED_AT + (choice >> 3)] |= 1 << (choice & 7)


def clear_stopped(view: memoryview) -> None:
    """Clear all stop bits for a new peer that starts again. Only the owner writes, after the old peer's proven death."""
    view[_STOPPED_AT : _STOPPED_AT + 8] = bytes(8)


def is_stopped(view: memoryview, choice: int) -> bool:
    """Whether the owner of this extent has stopped a choice."""
    return bool(view[_STOPPED_AT + (choice >> 3)] & (1 << (choice & 7)))
