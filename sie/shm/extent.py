"""Writes an extent: prologue with cancel byte and stop bits, typed header, aligned arrays.

Writing existing arrays:                     plan = plan_arrays([("token_ids", "<i4", (t,)), ...])
                                              length = write_extent(lease.view, encode(header), plan.refs, arrays)
Writing in place, without a copy:            payload = begin_extent(lease.view, encode(header))
                                              array_view(payload, plan.refs[0])[:] = ...

An `ArrayRef` is relative to the payload, which begins at the first 64-byte multiple after the header. So refs can be
part of the header, whose size decides where the payload begins. `sie.values.work_bytes` reads extents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sie.values.work import ArrayRef
from sie.values.work_bytes import DTYPES, MAX_HEADER_BYTES, PROLOGUE, PROLOGUE_BYTES

_STOPPED_AT: Final = 8


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
