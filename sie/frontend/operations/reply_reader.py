"""Reads and checks the arrays of an encode reply, as views for a dialect to encode, and the times of any reply.

Another process wrote the extent. Offsets are copied before they are checked, so they cannot change afterwards. Layout:
`sie.values.work.ReplyHeader`.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.frontend.engine.interface import Reply
from sie.ipc.messages import ModelEntry
from sie.values.card import ModelCard
from sie.values.errors import Internal, ProtocolError
from sie.values.inference import EncodeReply, EncodeRequest, RaggedRows, RowArray, Timing
from sie.values.output_kinds import RAGGED, OutputKind, offsets_name
from sie.values.work import ArrayRef, ReplyHeader
from sie.values.work_bytes import DTYPES, PROLOGUE, PROLOGUE_BYTES, REPLY_TIMES, array_view, read_extent

_DENSE_ONLY: Final = ("dense",)
_decoder: Final = msgspec.msgpack.Decoder(ReplyHeader)


def read_reply(
    reply: Reply, entry: ModelEntry, request: EncodeRequest, began_ns: int, tokenization_ns: int
) -> EncodeReply:
    """Return a reply's rows and times; the rows are valid until `reply.release`.

    began_ns is when the request's headers were read. Raises Internal when the extent does not match the layout.
    """
    try:
        if not request.output_types or request.output_types == _DENSE_ONLY:
            rows, times = _read_dense(reply.view)
            answer = _answer(entry, request, reply, timing_of(reply, times, began_ns, tokenization_ns), rows)
        else:
            answer = _answer(entry, request, reply, _NO_TIME, _Rows(count_items(request), _NO_BYTES, "<f4", 0))
            times = _read_outputs(reply.view, entry, request, answer)
            answer.timing = timing_of(reply, times, began_ns, tokenization_ns)
    except (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, struct.error) as error:
        raise Internal("the worker's reply could not be read") from error
    if answer.num_items != count_items(request):
        raise Internal("the worker's reply has another shape than the request")
    if request.images is not None:
        answer.num_images = sum(map(len, request.images.values()))
    if request.cuts:
        answer.cuts = request.cuts.keys()
    return answer


def timing_of(reply: Reply, times: Sequence[int], began_ns: int, tokenization_ns: int) -> Timing:
    """Return the time of each stage of a request; times are from the reply (`sie.values.work.ReplyHeader`)."""
    started_ns, inference_ns, postprocessing_ns = times
    return Timing(
        total_ms=(time.monotonic_ns() - began_ns) / 1e6,
        queue_ms=max(0, started_ns - reply.submitted_ns) / 1e6,
        tokenization_ms=tokenization_ns / 1e6,
        inference_ms=inference_ns / 1e6,
        postprocessing_ms=postprocessing_ns / 1e6,
        submitted_ns=reply.submitted_ns,
    )


def read_pieces(reply: Reply, output: str, num_items: int) -> tuple[Sequence[NDArray[Any]], Sequence[int]]:
    """Return one output of an extractor, a view for each of num_items items, and the reply's times.

    The views alias the extent. Raises Internal when the extent does not match the layout.
    """
    try:
        header, payload = read_extent(reply.view, _decoder)
        refs = {ref.name: ref for ref in header.arrays}
        times = REPLY_TIMES.unpack_from(payload, _ref(refs, "times", 1).offset)
        values = array_view(payload, refs[output])
        if output == "logits":
            if values.ndim != 2 or len(values) != num_items:
                raise ProtocolError(f"logits of shape {values.shape} for {num_items} items")
            return list(values), times
        bounds = _offsets(payload, refs, offsets_name(output), num_items, len(values))
    except (ProtocolError, KeyError, struct.error) as error:
        raise Internal("the worker's reply could not be read") from error
    return [values[start:end] for start, end in itertools.pairwise(bounds)], times


def count_items(request: EncodeRequest) -> int:
    """Return how many items a request has."""
    return len(request.texts if request.texts is not None else request.token_lists or ())


def dense_dims(card: ModelCard, request: EncodeRequest) -> int:
    """Return the width of a resolved request's dense vectors before they are cut; 0 for a model without them."""
    if request.muvera is not None:
        return request.muvera.width(card.dims["multivector"])
    return card.dims.get("dense", 0)


class _Rows(NamedTuple):
    """Dense rows: their number, bytes, dtype code and width."""

    num_items: int
    values: memoryview
    dtype: str
    width: int


def _read_dense(view: memoryview) -> tuple[_Rows, tuple[int, int, int]]:
    """Return the rows and the times of a reply with no other arrays."""
    end: int = PROLOGUE_BYTES + PROLOGUE.unpack_from(view)[1]
    payload = (end + 63) & ~63
    code, num_items, width, offset, nbytes = _rows_of(bytes(view[PROLOGUE_BYTES:end]))
    start = payload + offset
    rows = view[start : start + nbytes]
    if len(rows) != nbytes:
        raise ProtocolError("rows beyond the end of a reply")
    return _Rows(num_items, rows, code, width), REPLY_TIMES.unpack_from(view, payload)


@lru_cache(maxsize=4096)
def _rows_of(header: bytes) -> tuple[str, int, int, int, int]:
    """Return (dtype code, n, width, offset in the payload, bytes) of a reply header's rows.

    Replies of one shape share a header, so a busy server answers from this cache. Raises ProtocolError.
    """
    for ref in _decoder.decode(header).arrays:
        dtype = DTYPES.get(ref.dtype)
        if ref.name == "dense" and dtype is not None and len(ref.shape) == 2 and min(ref.shape) > 0 and ref.offset >= 0:
            num_items, width = ref.shape
            return ref.dtype, num_items, width, ref.offset, num_items * width * dtype.itemsize
    raise ProtocolError("a reply without rows")


def _read_outputs(
    view: memoryview, entry: ModelEntry, request: EncodeRequest, answer: EncodeReply
) -> tuple[int, int, int]:
    """Read a reply with several outputs, or one of unknown size, into an answer; return its times.

    Headers are not cached here, because each reply has a different one.
    """
    header, payload = read_extent(view, _decoder)
    refs = {ref.name: ref for ref in header.arrays}
    num_items, dims = answer.num_items, entry.card.dims
    if "dense" in (request.output_types or ()):
        ref = _ref(refs, "dense", 2)
        if ref.shape[0] != num_items:
            raise ProtocolError("another number of dense rows than of items")
        answer.values, answer.dtype, answer.width = _bytes_of(payload, ref), ref.dtype, ref.shape[1]
    answer.ragged = {
        name: _read_ragged(payload, refs, kind, num_items, dims[name])
        for name, kind in RAGGED.items()
        if name in (request.output_types or ())
    }
    return REPLY_TIMES.unpack_from(payload, _ref(refs, "times", 1).offset)


def _read_ragged(
    payload: memoryview, refs: dict[str, ArrayRef], kind: OutputKind, num_items: int, dims: int
) -> RaggedRows:
    found = [_ref(refs, form.name, 1 + form.has_rows) for form in kind.arrays]
    for form, ref in zip(kind.arrays, found, strict=True):
        if form.dtype and ref.dtype != form.dtype:
            raise ProtocolError(f"{form.name} of {ref.dtype}")
    num_entries = min(ref.shape[0] for ref in found)
    offsets = _offsets(payload, refs, offsets_name(kind.name), num_items, num_entries)
    arrays = [RowArray(ref.dtype, _bytes_of(payload, ref), prod(ref.shape[1:])) for ref in found]
    return RaggedRows(dims, offsets, tuple(arrays))


def _ref(refs: dict[str, ArrayRef], name: str, num_dimensions: int) -> ArrayRef:
    ref = refs.get(name)
    if ref is None or len(ref.shape) != num_dimensions:
        raise ProtocolError(f"a reply without {name}")
    return ref


def _bytes_of(payload: memoryview, ref: ArrayRef) -> memoryview:
    """Return an array's bytes, which lie within the payload."""
    nbytes = array_view(payload, ref).nbytes
    return payload[ref.offset : ref.offset + nbytes]


def _offsets(payload: memoryview, refs: dict[str, ArrayRef], name: str, num_items: int, num_rows: int) -> list[int]:
    array = array_view(payload, _ref(refs, name, 1))
    offsets: list[int] = array.tolist()
    rises = all(start <= end for start, end in itertools.pairwise(offsets))
    if array.dtype != np.int32 or len(offsets) != num_items + 1 or offsets[0] != 0 or not rises:
        raise ProtocolError(f"{name} that do not rise from 0")
    if offsets[-1] != num_rows:
        raise ProtocolError(f"{name} end at {offsets[-1]}, not at {num_rows}")
    return offsets


def _answer(entry: ModelEntry, request: EncodeRequest, reply: Reply, timing: Timing, rows: _Rows) -> EncodeReply:
    num_items, values, dtype, width = rows
    return EncodeReply(
        model=request.model,
        ids=request.ids,
        num_items=num_items,
        values=values,
        dtype=dtype,
        width=width,
        dims=request.dimensions or dense_dims(entry.card, request),
        output_dtype=request.output_dtype or "float32",
        input_tokens=reply.num_tokens - request.image_tokens,
        timing=timing,
    )


_NO_BYTES: Final = memoryview(b"")
_NO_TIME: Final = Timing()
