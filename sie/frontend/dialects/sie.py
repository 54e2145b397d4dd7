"""Owns the native SIE wire: encode bodies to a typed request, replies and errors to bytes.

A request is read in two steps, because the order of the answers is part of the wire: `decode_encode` (a malformed body
is 400 even for an unknown model), then the caller finds the model (404), then `resolve_encode` judges profile, options,
output types and modality against its card (400). Source: SIE API reference, sections 2, 3, 5, 9, 11 and 12.
"""

from __future__ import annotations

import difflib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from sie.cards import ModelCard
from sie.catalog.options import OUTPUT_TYPES
from sie.errors import BadRequest, InputTooLong, NotFound, SieError
from sie.frontend.dialects import outputs
from sie.frontend.dialects.arrays import array_header, pack
from sie.frontend.http.body_limits import check_json, decode_free_form, decode_typed
from sie.frontend.inputs.options import merge_options
from sie.limits import Limits
from sie.types import OUTPUT_DTYPES, EncodeReply, EncodeRequest, MediaItems, Timing

_MOST_ITEMS = 65_536  # the most that settings allow; the setting itself is checked after decoding
_MOST_NAMES = 64
_MAX_SUGGEST_CHARS = 200
_ABSENT = msgspec.Raw(b"")
_DENSE_ONLY = ("dense",)


class Media(msgspec.Struct, gc=False):
    data: memoryview
    format: str | None = None


class Audio(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    data: memoryview
    format: str | None = None
    sample_rate: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None


class Item(msgspec.Struct, gc=False):
    """One item of a native request, in every operation."""

    id: str | None = None
    text: str | None = None
    images: Annotated[list[Media], msgspec.Meta(max_length=_MOST_NAMES)] | None = None
    audio: Audio | None = None
    video: Media | None = None
    document: Media | None = None
    metadata: msgspec.Raw = _ABSENT


class EncodeParams(msgspec.Struct, gc=False):
    output_types: Annotated[list[str], msgspec.Meta(max_length=_MOST_NAMES)] | None = None
    output_dtype: str | None = None
    instruction: str | None = None
    options: msgspec.Raw = _ABSENT


class EncodeBody(msgspec.Struct, gc=False):
    items: Annotated[list[Item], msgspec.Meta(max_length=_MOST_ITEMS)]
    params: EncodeParams | None = None


_FROM_MSGPACK = msgspec.msgpack.Decoder(EncodeBody)
_FROM_JSON = msgspec.json.Decoder(EncodeBody)
_NO_PARAMS = EncodeParams()


def decode_encode(body: bytes, msgpack: bool, model: str, limits: Limits) -> EncodeRequest:
    """Return the request in an encode body, shapes and sizes checked; pass it to `resolve_encode` next.

    Unknown fields are ignored, except in `audio`. Raises BadRequest (InputTooLong for limits) with the path of the
    fault in its text.
    """
    call = read_encode(body, msgpack, limits)
    text = bare_text(call, len(body), limits)
    if text is not None:
        return EncodeRequest(model=model, texts=[text])
    return to_encode(call, msgpack, model, len(body), limits)


def read_encode(body: bytes, msgpack: bool, limits: Limits) -> EncodeBody:
    """Return what an encode body holds. Raises BadRequest as `decode_encode`."""
    if not msgpack:
        check_json(body, limits.max_depth)
    return decode_typed(_FROM_MSGPACK if msgpack else _FROM_JSON, body)


def bare_text(call: EncodeBody, body_bytes: int, limits: Limits) -> str | None:
    """Return the text of a request that is one text and nothing else, as most small ones: then there is nothing to check."""
    items = call.items
    if len(items) != 1 or call.params is not None or body_bytes > limits.max_item_text_bytes:
        return None
    (item,) = items
    if item.id is not None or item.metadata is not _ABSENT:
        return None
    return None if item.images or item.audio or item.video or item.document else item.text


def to_encode(call: EncodeBody, msgpack: bool, model: str, body_bytes: int, limits: Limits) -> EncodeRequest:
    """Return the request in what `read_encode` gave. Raises as `decode_encode`."""
    items = call.items
    check_count(items, limits.max_items)
    check_items(items, msgpack, body_bytes, limits.max_item_text_bytes)
    params = call.params or _NO_PARAMS
    non_text = find_non_text(items)
    media = None if non_text is None else read_media(items, limits)
    ids = [item.id for item in items]
    return EncodeRequest(
        model=model,
        texts=[item.text or "" for item in items] if non_text is None else None,
        ids=[] if ids.count(None) == len(ids) else ids,
        output_types=None if params.output_types is None else tuple(params.output_types),
        output_dtype=params.output_dtype,
        instruction=params.instruction,
        options={} if params.options is _ABSENT else decode_free_form(
            params.options, msgpack=msgpack, path="$.params.options", max_depth=limits.max_depth
        ),
        non_text_item=non_text,
        media=media,
    )  # fmt: skip


def read_media(items: Sequence[Item], limits: Limits) -> MediaItems:
    """Return the items of a request that holds more than texts. Raises BadRequest for what is over a limit."""
    images = {index: [image.data for image in item.images] for index, item in enumerate(items) if item.images}
    if sum(map(len, images.values())) > limits.max_images:
        raise BadRequest(f"A request must hold at most {limits.max_images} images; split it")
    for index, encoded in images.items():
        if len(encoded) > limits.max_item_images:
            raise BadRequest(f"Field 'items[{index}].images' must hold at most {limits.max_item_images} images")
        for number, data in enumerate(encoded):
            if data.nbytes > limits.max_image_bytes:
                raise InputTooLong(
                    f"Field 'items[{index}].images[{number}].data' must hold at most {limits.max_image_bytes} bytes",
                    code=BadRequest.code,
                )
    return MediaItems(texts=[item.text for item in items], images=images, other=_find_other(items))


def _find_other(items: Sequence[Item]) -> str | None:
    for index, item in enumerate(items):
        for name in ("audio", "video", "document"):
            if getattr(item, name) is not None:
                return f"$.items[{index}].{name}"
    return None


def check_media(media: MediaItems, card: ModelCard) -> None:
    """Raise BadRequest unless every item is a text or images, for a model that takes both."""
    if media.other is not None:
        kind = media.other.rpartition(".")[2]
        raise BadRequest(f"Model '{card.id}' does not take {kind} input - at `{media.other}`")
    for index, text in enumerate(media.texts):
        if text is None and index not in media.images:
            raise BadRequest(f"Model '{card.id}' requires text or image input - at `$.items[{index}]`")


def check_count(items: Sequence[Item], max_items: int) -> None:
    """Raise BadRequest unless there are 1 to max_items items."""
    if not items:
        raise BadRequest("Field 'items' must not be empty")
    if len(items) > max_items:
        raise BadRequest(f"Field 'items' must hold at most {max_items} items, got {len(items)}; split the request")


def check_items(
    items: Sequence[Item], msgpack: bool, body_bytes: int, max_item_bytes: int, field: str = "items[{}]"
) -> None:
    """Check each item's metadata type and its size: UTF-8 bytes of the text and wire bytes of the metadata.

    field is where an item stands in the body, `{}` its number.
    """
    may_exceed = body_bytes > max_item_bytes  # JSON escapes only shrink
    for index, item in enumerate(items):
        metadata = item.metadata
        if metadata is not _ABSENT:
            _check_is_map(metadata, msgpack, field.format(index))
        if may_exceed:
            num_bytes = len((item.text or "").encode()) + memoryview(metadata).nbytes
            if num_bytes > max_item_bytes:
                raise InputTooLong(
                    f"Field '{field.format(index)}' must hold at most {max_item_bytes} bytes of UTF-8 text",
                    code=BadRequest.code,
                )


def _check_is_map(raw: msgspec.Raw, msgpack: bool, field: str) -> None:
    """Look at the first byte only: the value itself is never decoded."""
    first = memoryview(raw)[0]
    is_map = first & 0xF0 == 0x80 or first in (0xDE, 0xDF, 0xC0) if msgpack else first in b"{n"
    if not is_map:
        raise BadRequest(f"Expected `object | null` - at `$.{field}.metadata`")


def find_non_text(items: Sequence[Item]) -> int | None:
    """Return the index of the first item without a text, or with media beside it."""
    for index, item in enumerate(items):
        if item.text is None or item.images or item.audio or item.video or item.document:
            return index
    return None


def resolve_encode(request: EncodeRequest, card: ModelCard) -> EncodeRequest:
    """Return the request with every precedence applied: output_types, output_dtype and instruction are final.

    `options` becomes the profile's with the request's on top, for the prompt, the tokenizer and the worker to read
    (`is_query`, `normalize`, templates, lengths). Raises BadRequest for a profile, option, output or item that this
    model cannot serve.
    """
    if request.options or card.profiles:
        request.options = merge_options(card, request.options, "$.params.options")
    options = request.options
    request.output_types = _resolve_output_types(request, card)
    request.output_dtype = request.output_dtype or options.get("output_dtype") or "float32"
    if request.output_dtype not in OUTPUT_DTYPES:
        raise BadRequest(f"Unsupported output_dtype: {request.output_dtype}")
    if request.instruction is None:
        request.instruction = options.get("instruction")
    if request.non_text_item is not None:
        media = request.media
        if media is None or card.image is None:
            raise BadRequest(f"Model '{card.id}' requires text input - at `$.items[{request.non_text_item}]`")
        check_media(media, card)
        request.texts = [text or "" for text in media.texts]
        request.images = media.images or None
    return request


def _resolve_output_types(request: EncodeRequest, card: ModelCard) -> tuple[str, ...]:
    wanted: Sequence[Any] | None = request.options.get("output_types")
    if wanted is None:
        if request.output_types is None and "dense" in card.outputs:
            return _DENSE_ONLY
        wanted = _DENSE_ONLY if request.output_types is None else request.output_types
    if not wanted:
        raise BadRequest("Field 'output_types' must not be empty")
    for name in wanted:
        if name not in OUTPUT_TYPES:
            raise BadRequest(f"Unknown output type {name!r}. Valid: {list(OUTPUT_TYPES)}")
        if name not in card.outputs:
            reason = card.missing_outputs.get(name)
            because = f" ({reason})" if reason else ""
            raise BadRequest(
                f"Model '{card.id}' does not support output type '{name}'{because}. Available: {card.wire_outputs}"
            )
    return tuple(dict.fromkeys(wanted))


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

    Reads reply.values once and keeps no view of it. As msgpack it is one join of cached fragments and row views.
    """
    if reply.sparse is None and reply.multivector is None:
        return _reply_msgpack(reply) if msgpack else _reply_json(reply)
    tail = _tail(reply.timing, reply.input_tokens, reply.num_images)
    if msgpack:
        parts = [_head(reply.model), *outputs.msgpack_items(reply), pack(tail)[1:]]
        return b"".join(parts)
    head = _to_json({"model": reply.model, "items": outputs.json_items(reply)})
    return head[:-1] + b"," + _to_json(tail)[1:]


def _reply_msgpack(reply: EncodeReply) -> bytes:
    count = reply.num_items
    rows = reply.values.cast("B")
    row_bytes = rows.nbytes // count
    before = outputs.dense_prefix(reply.output_dtype, reply.dims, reply.dtype, reply.width, row_bytes)
    parts: list[Any] = [_head(reply.model), array_header(count)]
    if not reply.ids:
        for start in range(0, count * row_bytes, row_bytes):
            parts += (_ONE_KEY, before, rows[start : start + row_bytes])
    else:
        for index, id_ in enumerate(reply.ids):
            own = _ONE_KEY if id_ is None else _ID_KEY + pack(id_)
            parts += (own, before, rows[index * row_bytes : (index + 1) * row_bytes])
    parts.append(_tail_msgpack(reply.timing, reply.input_tokens, reply.num_images))
    return b"".join(parts)


def before_row(reply: EncodeReply) -> bytes:
    """Return the msgpack body of a reply of one item without an id, up to the bytes of its row."""
    row = outputs.dense_prefix(reply.output_dtype, reply.dims, reply.dtype, reply.width, reply.values.nbytes)
    return _head(reply.model) + array_header(1) + _ONE_KEY + row


def with_row(before: bytes, row: memoryview, timing: Timing, input_tokens: int) -> bytes:
    """Return what `encode_reply` does as msgpack, from what `before_row` gave and a row."""
    return b"".join((before, row, _tail_msgpack(timing, input_tokens, 0)))


_ONE_KEY = b"\x81"
_ID_KEY = b"\x82" + pack("id")


_TIMES = (b"\xa6timing\x85\xa8total_ms\xcb", b"\xa8queue_ms\xcb", b"\xaftokenization_ms\xcb", b"\xacinference_ms\xcb",
          b"\xb1postprocessing_ms\xcb")  # fmt: skip
_pack_times = struct.Struct(">" + "".join(f"{len(key)}sd" for key in _TIMES)).pack


def _tail_msgpack(timing: Timing, input_tokens: int, num_images: int) -> bytes:
    """Return the last two keys of a reply, without the header of a map of their own: they belong to the body's."""
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
def _head(model: str) -> bytes:
    return b"\x84" + pack("model") + pack(model) + pack("items")


def _reply_json(reply: EncodeReply) -> bytes:
    rows = np.frombuffer(reply.values.cast("B"), reply.dtype).reshape(reply.num_items, reply.width).tolist()
    dtype = outputs.wire_dtype(reply.output_dtype)
    ids: Sequence[str | None] = reply.ids or (None,) * reply.num_items
    items: list[dict[str, Any]] = []
    for id_, row in zip(ids, rows, strict=True):
        dense = {"dense": {"dims": reply.dims, "dtype": dtype, "values": row}}
        items.append(dense if id_ is None else {"id": id_, **dense})
    head = _to_json({"model": reply.model, "items": items})
    return head[:-1] + b"," + _to_json(_tail(reply.timing, reply.input_tokens, reply.num_images))[1:]


def _tail(timing: Timing, input_tokens: int, num_images: int) -> _Tail:
    body = TimingBody(
        timing.total_ms,
        timing.queue_ms,
        timing.tokenization_ms,
        timing.inference_ms,
        timing.postprocessing_ms or None,
    )
    return _Tail(body, _Usage(input_tokens, num_images))


def error_body(error: SieError) -> bytes:
    """Return the native envelope: `{"detail": {code, message, ...extras}}`. Always JSON."""
    return _to_json({"detail": {"code": error.code, "message": error.message, **error.extras}})


def not_found_body() -> bytes:
    """Return the body of a 404 for an unknown path."""
    return b'{"detail":"Not Found"}'


def method_not_allowed_body() -> bytes:
    """Return the body of a 405; the `Allow` header is the caller's."""
    return b'{"detail":"Method Not Allowed"}'


def model_not_found(model: str, known: Iterable[str]) -> NotFound:
    """Return the error for an unknown model id, with up to three near ids.

    The wire has no full stop before the suggestion. Source: SIE API reference, section 2.
    """
    message = f"Model '{model}' not found"
    near = _near_ids(model, list(known)) if len(model) <= _MAX_SUGGEST_CHARS else []
    if near:
        message += f" Did you mean {', '.join(repr(id_) for id_ in near)}?"
    return NotFound(message)


def _near_ids(model: str, known: list[str]) -> list[str]:
    """Match on the full id first, then on the part after the last slash."""
    near = difflib.get_close_matches(model, known, n=3, cutoff=0.6)
    by_tail: dict[str, list[str]] = {}
    for id_ in known:
        by_tail.setdefault(id_.rpartition("/")[2], []).append(id_)
    for tail in difflib.get_close_matches(model.rpartition("/")[2], by_tail, n=3, cutoff=0.6):
        near += [id_ for id_ in by_tail[tail] if id_ not in near]
    return near[:3]
