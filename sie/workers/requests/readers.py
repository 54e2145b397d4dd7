"""Caches one reader for each request header: the header is checked once, then only each request's bytes.

Only for frequent kinds: one text, one row of token ids, tensors. `sie.workers.requests.worker_request` reads the others.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from sie.shm.layout import ProtocolError
from sie.values.work import ArrayRef, WorkHeader
from sie.workers.model_api import TensorInputs
from sie.workers.requests.tensors import read_task

Reader = Callable[[memoryview], tuple[list[int], Sequence[Any]]]
"""Takes a request's payload; returns each item's cost and input, which alias it. Raises ProtocolError."""

_BOUNDS: Final = struct.Struct("<2i")
_EMPTY: Final = np.empty(0, np.uint8)


def reader_of(header: WorkHeader, refs: dict[str, ArrayRef]) -> Reader | None:
    """Return the reader for requests with this header, or None for other kinds and invalid headers."""
    if header.num_items != 1:
        return None
    if header.operation == "infer":
        return _tensor_reader(header)
    if header.operation != "encode" or "pixels" in refs or not _is_pair(refs.get("cu_seqlens")):
        return None
    tokens, text = refs.get("token_ids"), refs.get("text")
    if tokens is not None:
        return _item_reader(refs["cu_seqlens"], tokens, None) if _is_row(tokens, "<i4") else None
    bounds = refs.get("text_offsets")
    if text is None or bounds is None or not (_is_row(text, "|u1") and _is_pair(bounds)):
        return None
    return _item_reader(refs["cu_seqlens"], text, bounds)


def _is_row(ref: ArrayRef, dtype: str) -> bool:
    return ref.dtype == dtype and len(ref.shape) == 1 and ref.shape[0] > 0 and ref.offset >= 0 and not ref.offset & 63


def _is_pair(ref: ArrayRef | None) -> bool:
    return ref is not None and _is_row(ref, "<i4") and ref.shape == (2,)


def _item_reader(costs: ArrayRef, data: ArrayRef, bounds: ArrayRef | None) -> Reader:
    """Return the reader of one item: its cost, and all of data. bounds are data's own; None: the costs."""
    count, dtype, offset = data.shape[0], np.dtype(data.dtype), data.offset
    costs_at, bounds_at = costs.offset, None if bounds is None else bounds.offset
    least_bytes = max(costs_at + _BOUNDS.size, (bounds_at or 0) + _BOUNDS.size, offset + count * dtype.itemsize)
    unpack, from_buffer = _BOUNDS.unpack_from, np.frombuffer

    def read(payload: memoryview) -> tuple[list[int], Sequence[Any]]:
        if len(payload) < least_bytes:
            raise ProtocolError("a request whose arrays lie outside its extent")
        first, cost = unpack(payload, costs_at)
        start, end = (first, cost) if bounds_at is None else unpack(payload, bounds_at)
        if first or start or cost < 0 or end != count:
            raise ProtocolError(f"one item of {cost} tokens, from {start} to {end} of {count}")
        return [cost], [from_buffer(payload, dtype, count, offset)]

    return read


def _tensor_reader(header: WorkHeader) -> Reader | None:
    try:
        task = read_task(header.task)
    except msgspec.MsgspecError:
        return None
    rows = [(ref.shape[0], ref.offset) for ref in header.arrays if ref.shape == (0,) or _is_row(ref, "|u1")]
    if header.output_types != ("tensors",) or not len(task.inputs) == len(header.arrays) == len(rows):
        return None
    least_bytes = max([count + offset for count, offset in rows], default=0)
    from_buffer, uint8 = np.frombuffer, np.dtype(np.uint8)

    def read(payload: memoryview) -> tuple[list[int], Sequence[Any]]:
        if len(payload) < least_bytes:
            raise ProtocolError("a request whose tensors lie outside its extent")
        data = [from_buffer(payload, uint8, count, offset) if count else _EMPTY for count, offset in rows]
        return [task.cost], [TensorInputs(task, tuple(data))]

    return read
