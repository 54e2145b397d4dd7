"""Joins the replies of single inputs to the reply of their request, in the form that an engine gives. Pure.

The bytes are those of `sie.values.work_bytes`: header, then aligned arrays. Rows follow one another; offsets go on where
those of the input before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.values.errors import ProtocolError
from sie.values.extract import Extraction
from sie.values.output_kinds import offsets_name
from sie.values.work import ReplyHeader
from sie.values.work_bytes import (
    REPLY_TIMES,
    array_view,
    decode_header,
    extent_bytes,
    extent_head,
    plan_arrays,
    read_extent,
    split_extent,
)

Arrays = dict[str, NDArray[Any]]
_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(ReplyHeader)
_OFFSETS: Final = "_offsets"
TIMES: Final = "times"


def read_arrays(reply: bytes | memoryview) -> Arrays:
    """Return a reply's arrays by name; they alias its bytes. Raises ProtocolError."""
    header, payload = read_extent(memoryview(reply), _decoder)
    return {ref.name: array_view(payload, ref) for ref in header.arrays}


def join_replies(replies: Sequence[Arrays], times: Sequence[int]) -> memoryview:
    """Return the reply of a request whose inputs, in order, have these replies; times are (start, inference, after).

    Raises ProtocolError for replies that do not fit together.
    """
    names = list(replies[0])
    if any(list(reply) != names for reply in replies):
        raise ProtocolError("the replies of one request have different arrays")
    joined: Arrays = {TIMES: np.array(times, np.int64)}
    for name in names:
        if name != TIMES:
            join = _join_offsets if name.endswith(_OFFSETS) else _join_rows
            joined[name] = join([reply[name] for reply in replies])
    return pack_arrays(joined)


def read_times(reply: bytes | memoryview) -> tuple[int, int, int]:
    """Return the times of a reply, (start, inference, after). Raises ProtocolError."""
    return REPLY_TIMES.unpack_from(reply, _times_at(memoryview(reply)))


def with_times(reply: bytes | memoryview, times: Sequence[int]) -> memoryview:
    """Return a copy of a reply with other times, (start, inference, after). Raises ProtocolError."""
    copy = bytearray(reply)
    REPLY_TIMES.pack_into(copy, _times_at(memoryview(reply)), *times)
    return memoryview(copy).toreadonly()


def _times_at(reply: memoryview) -> int:
    """Return where the times of a reply are. Raises ProtocolError."""
    header, payload = split_extent(reply)
    start = len(reply) - len(payload) + _times_offset(header)
    if start + REPLY_TIMES.size > len(reply):
        raise ProtocolError("a reply whose times are cut off")
    return start


@lru_cache(256)
def _times_offset(header: bytes) -> int:
    """Return where the times are in the payload behind a header; replies of one layout have the same bytes there."""
    for ref in decode_header(header, _decoder).arrays:
        if ref.name == TIMES and ref.dtype == "<i8" and ref.shape == (3,) and ref.offset >= 0:
            return ref.offset
    raise ProtocolError("a reply without times")


def _join_rows(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    first = parts[0]
    if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in parts):
        raise ProtocolError("the replies of one request have rows of different forms")
    return first if len(parts) == 1 else np.concatenate(parts)


def _join_offsets(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    if any(part.dtype != np.int32 or part.ndim != 1 or not len(part) for part in parts):
        raise ProtocolError("offsets of another form")
    ends = np.cumsum([0, *(int(part[-1]) for part in parts)])
    return np.concatenate([[0], *(part[1:] + end for part, end in zip(parts, ends, strict=False))]).astype(np.int32)


def pack_arrays(arrays: Arrays) -> memoryview:
    """Return arrays as the bytes of a reply."""
    plan = plan_arrays([(name, array.dtype.str, array.shape) for name, array in arrays.items()])
    header = _encode(ReplyHeader(plan.refs))
    start = extent_bytes(len(header), 0)
    packed = bytearray(start + plan.nbytes)
    head = extent_head(header)
    packed[: len(head)] = head
    for ref in plan.refs:
        data = np.ascontiguousarray(arrays[ref.name]).reshape(-1).view(np.uint8).data
        packed[start + ref.offset : start + ref.offset + len(data)] = data
    return memoryview(packed).toreadonly()


def pack_extractions(extractions: Sequence[Extraction], times: Sequence[int]) -> memoryview:
    """Return extractions as the reply of a worker that answers with whole extractions."""
    pieces = [_encode(extraction) for extraction in extractions]
    offsets = np.cumsum([0, *map(len, pieces)]).astype(np.int32)
    whole = np.frombuffer(b"".join(pieces), np.uint8)
    return pack_arrays({TIMES: np.array(times, np.int64), offsets_name("extract"): offsets, "extract": whole})
