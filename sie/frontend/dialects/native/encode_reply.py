"""Encodes the replies to native SIE encode requests, as msgpack and as JSON.

Rows are written directly from the reply's extent. One `struct` call writes the tail of a small reply.
Source: SIE API reference, sections 2, 3, 5 and 11.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import msgspec

from sie.frontend.dialects.native import output_maps
from sie.frontend.dialects.native.arrays import array_header, pack
from sie.values.inference import EncodeReply, Timing


class TimingBody(msgspec.Struct, frozen=True):
    total_ms: float
    queue_ms: float
    tokenization_ms: float
    inference_ms: float
    postprocessing_ms: float | None


class _Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    input_tokens: int
    images: int = 0


class _Tail(msgspec.Struct, frozen=True):
    """The last two keys of a reply, in both formats."""

    timing: TimingBody
    usage: _Usage


_to_json = msgspec.json.Encoder().encode


def encode_reply(reply: EncodeReply, msgpack: bool) -> bytes:
    """Return the body of an encode reply: model, items, timing, usage, in this order.

    Reads reply.values once and keeps no view of it. A msgpack body is one join of cached fragments and row views.
    """
    if not msgpack:
        return _reply_json(reply)
    if not reply.ragged and not reply.cuts:
        return _reply_msgpack(reply)
    tail = _tail(reply.timing, reply.input_tokens, reply.num_images)
    return b"".join([_head(reply.model), *output_maps.msgpack_items(reply), pack(tail)[1:]])


def _reply_json(reply: EncodeReply) -> bytes:
    """Encode item by item: the numbers of all items as Python objects would take more memory than the body."""
    parts = [b'{"model":', _to_json(reply.model), b',"items":']
    for index, item in enumerate(output_maps.json_items(reply)):
        parts += (b"," if index else b"[", _to_json(item))
    parts += (b"],", _to_json(_tail(reply.timing, reply.input_tokens, reply.num_images))[1:])
    return b"".join(parts)


def _reply_msgpack(reply: EncodeReply) -> bytes:
    count = reply.num_items
    rows = reply.values.cast("B")
    row_bytes = len(rows) // count
    tail = _tail_msgpack(reply.timing, reply.input_tokens, reply.num_images)
    if count == 1 and not reply.ids:  # most requests: one look-up instead of four
        head = _one_row_head(reply.model, reply.output_dtype, reply.dims, reply.dtype, reply.width, row_bytes)
        return b"".join((head, rows, tail))
    before = output_maps.dense_prefix(reply.output_dtype, reply.dims, reply.dtype, reply.width, row_bytes)
    parts: list[Any] = [_head(reply.model), array_header(count)]
    if not reply.ids:
        for start in range(0, count * row_bytes, row_bytes):
            parts += (_ONE_KEY, before, rows[start : start + row_bytes])
    else:
        for index, id_ in enumerate(reply.ids):
            own = _ONE_KEY if id_ is None else _ID_KEY + pack(id_)
            parts += (own, before, rows[index * row_bytes : (index + 1) * row_bytes])
    parts.append(tail)
    return b"".join(parts)


_ONE_KEY = b"\x81"
_ID_KEY = b"\x82" + pack("id")


_TIMES = (b"\xa6timing\x85\xa8total_ms\xcb", b"\xa8queue_ms\xcb", b"\xaftokenization_ms\xcb", b"\xacinference_ms\xcb",
          b"\xb1postprocessing_ms\xcb")  # fmt: skip
_pack_times = struct.Struct(">" + "".join(f"{len(key)}sd" for key in _TIMES)).pack


def _tail_msgpack(timing: Timing, input_tokens: int, num_images: int) -> bytes:
    """Return the last two keys of a reply, without a map header: they belong to the body's map."""
    if num_images or not timing.postprocessing_ms:
        return pack(_tail(timing, input_tokens, num_images))[1:]
    total, queue, tokenization, inference, postprocessing = _TIMES
    times = _pack_times(
        total, timing.total_ms, queue, timing.queue_ms, tokenization, timing.tokenization_ms, inference, timing.inference_ms,
        postprocessing, timing.postprocessing_ms,
    )  # fmt: skip
    return times + _usage(input_tokens)


@lru_cache(maxsize=1024)
def _usage(input_tokens: int) -> bytes:
    return pack("usage") + pack(_Usage(input_tokens))


@lru_cache(maxsize=1024)
def _one_row_head(  # noqa: PLR0917  # keywords cost
    model: str, output_dtype: str, dims: int, dtype: str, width: int, row_bytes: int
) -> bytes:
    """Return all bytes before the row of a reply with one item and no id."""
    before = output_maps.dense_prefix(output_dtype, dims, dtype, width, row_bytes)
    return _head(model) + array_header(1) + _ONE_KEY + before


@lru_cache(maxsize=1024)
def _head(model: str) -> bytes:
    return b"\x84" + pack("model") + pack(model) + pack("items")


def _tail(timing: Timing, input_tokens: int, num_images: int) -> _Tail:
    body = TimingBody(
        timing.total_ms,
        timing.queue_ms,
        timing.tokenization_ms,
        timing.inference_ms,
        timing.postprocessing_ms or None,
    )
    return _Tail(body, _Usage(input_tokens, num_images))
