"""Reads a tensor reply and holds it. Its outputs are views of an extent, which the worker then gets back."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from sie.frontend.engine.interface import Reply
from sie.frontend.operations.reply_reader import timing_of
from sie.values.errors import Internal, ProtocolError
from sie.values.tensor import Tensor, TensorReply
from sie.values.work import ArrayRef, TensorForm, TensorReplyHeader
from sie.values.work_bytes import REPLY_TIMES, decode_header, split_extent

_decoder: Final = msgspec.msgpack.Decoder(TensorReplyHeader)
_MAX_CACHED_HEADER_BYTES: Final = 2048


class HeldReply:
    """A reply whose outputs are valid inside a `with` block.

    raw is the worker's reply whose extent the outputs use; None if they have memory of their own.
    """

    __slots__ = ("_raw", "_reply")

    def __init__(self, reply: TensorReply, raw: Reply | None = None) -> None:
        """Take ownership of raw."""
        self._reply = reply
        self._raw = raw

    @property
    def nbytes(self) -> int:
        """The size of its outputs in bytes."""
        return sum([len(output.data) for output in self._reply.outputs])

    @property
    def num_items(self) -> int:
        """The largest first dimension of its outputs, which is the batch in a model with a batch dimension."""
        return max([output.shape[0] if output.shape else 1 for output in self._reply.outputs], default=0)

    def __enter__(self) -> TensorReply:
        return self._reply

    def __exit__(self, *_exc: object) -> None:
        if self._raw is not None:
            self._raw.release()


def hold(raw: Reply, model: str, began_ns: int, prepared_ns: int) -> HeldReply:
    """Return a reply's tensors, to be read in a `with` block. Raises the errors of `read_tensors`, after releasing the reply."""
    try:
        return HeldReply(read_tensors(raw, model, began_ns, prepared_ns), raw)
    except BaseException:
        raw.release()
        raise


def read_tensors(reply: Reply, model: str, began_ns: int, prepared_ns: int) -> TensorReply:
    """Return a reply's tensors, which are views of its extent, and its times. Raises Internal if the layout is wrong.

    prepared_ns is the time that turning its inputs into tensors took. It is reported as tokenization time.
    """
    try:
        header, payload = split_extent(reply.view)
        layout = (_reply_layout if len(header) <= _MAX_CACHED_HEADER_BYTES else _reply_layout.__wrapped__)(header)
        if layout.nbytes > len(payload):
            raise ProtocolError("tensors that lie outside their extent")
        times = REPLY_TIMES.unpack_from(payload, layout.times_offset)
    except (ProtocolError, struct.error) as error:
        raise Internal("the worker's reply could not be read") from error
    outputs = [Tensor(form.name, form.datatype, form.shape, payload[start:end]) for form, start, end in layout.places]
    return TensorReply(model=model, outputs=outputs, timing=timing_of(reply, times, began_ns, prepared_ns))


def places_of(header: bytes) -> tuple[int, list[tuple[int, int]], int]:
    """Return the places of a reply's times and tensors in its payload, and the payload's minimum size in bytes.

    Raises ProtocolError.
    """
    layout = _reply_layout(header)
    return layout.times_offset, [(start, end) for _, start, end in layout.places], layout.nbytes


class _ReplyLayout(NamedTuple):
    """The places of a reply's times and tensors in its payload, which has at least nbytes."""

    times_offset: int
    places: tuple[tuple[TensorForm, int, int], ...]
    nbytes: int


@lru_cache(maxsize=1024)
def _reply_layout(encoded: bytes) -> _ReplyLayout:
    """Return the layout in a reply's header. Raises ProtocolError."""
    header = decode_header(encoded, _decoder)
    times, *refs = header.arrays or (ArrayRef("", "", (), 0),)
    if len(refs) != len(header.tensors) or (times.dtype, times.shape) != ("<i8", (3,)):
        raise ProtocolError("a reply with other arrays than tensors")
    for ref in header.arrays:
        if (
            ref.offset < 0
            or ref.offset & 63
            or (ref is not times and ref.dtype != "|u1")
            or len(ref.shape) != 1
            or ref.shape[0] < 0
        ):
            raise ProtocolError("a tensor that is not an array of bytes")
    places = tuple([
        (form, ref.offset, ref.offset + ref.shape[0]) for form, ref in zip(header.tensors, refs, strict=True)
    ])  # fmt: skip
    return _ReplyLayout(times.offset, places, max([times.offset + REPLY_TIMES.size, *(end for _, _, end in places)]))
