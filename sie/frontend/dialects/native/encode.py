"""Decodes the bodies of native SIE encode requests, and encodes errors. `encode_reply` encodes the replies.

A request is read in two steps, because the order of the checks is part of the wire format. First `decode_encode` checks
the body: a malformed one is a 400 even for an unknown model. Then the caller finds the model (404). Then
`resolve_encode` checks profile, options, output types and modality against the model's card (400).
Source: SIE API reference, sections 2, 3, 5, 9, 11 and 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from sie.config.limits import Limits
from sie.frontend.inputs.bounded_json import MAX_FREE_FORM_BYTES, check_json, decode_free_form, decode_typed
from sie.values.errors import BadRequest, InputTooLong, SieError
from sie.values.inference import EncodeRequest, MediaItems

_MOST_ITEMS = 65_536  # the setting's upper bound; the setting itself is checked after decoding
_MOST_LISTED = 64
_ABSENT = msgspec.Raw(b"")


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
    images: Annotated[list[Media], msgspec.Meta(max_length=_MOST_LISTED)] | None = None
    audio: Audio | None = None
    video: Media | None = None
    document: Media | None = None
    metadata: msgspec.Raw = _ABSENT


class EncodeParams(msgspec.Struct, gc=False):
    output_types: Annotated[list[str], msgspec.Meta(max_length=_MOST_LISTED)] | None = None
    output_dtype: str | None = None
    instruction: str | None = None
    options: msgspec.Raw = _ABSENT


class EncodeBody(msgspec.Struct, gc=False):
    items: Annotated[list[Item], msgspec.Meta(max_length=_MOST_ITEMS)]
    params: EncodeParams | None = None


_FROM_MSGPACK = msgspec.msgpack.Decoder(EncodeBody)
_FROM_JSON = msgspec.json.Decoder(EncodeBody)
_METADATA = msgspec.msgpack.Decoder(dict[str, Any] | None)
_NO_PARAMS = EncodeParams()


def decode_encode(body: bytes, msgpack: bool, model: str, limits: Limits) -> EncodeRequest:
    """Return the request in an encode body, with checked shapes and sizes; pass it to `resolve_encode` next.

    Unknown fields are ignored, except in `audio`. Raises BadRequest (InputTooLong for limits). Its text holds the
    path of the fault.
    """
    if not msgpack:
        check_json(body, limits.max_depth)
    call = decode_typed(_FROM_MSGPACK if msgpack else _FROM_JSON, body)
    items = call.items
    check_count(items, limits.max_items)
    check_items(items, msgpack, len(body), limits.max_item_text_bytes)
    params = call.params or _NO_PARAMS
    non_text = find_non_text(items)
    ids: list[str | None] = []
    texts: list[str] = []
    has_ids = False
    for item in items:  # one loop: two comprehensions cost more for the usual single item
        ids.append(item.id)
        texts.append(item.text or "")
        has_ids = has_ids or item.id is not None
    return EncodeRequest(
        model=model,
        texts=texts if non_text is None else None,
        ids=ids if has_ids else [],
        output_types=None if params.output_types is None else tuple(params.output_types),
        output_dtype=params.output_dtype,
        instruction=params.instruction,
        options={} if params.options is _ABSENT else decode_free_form(
            params.options, msgpack=msgpack, path="$.params.options", max_depth=limits.max_depth
        ),
        non_text_item=non_text,
        media=None if non_text is None else read_media(items, limits),
    )  # fmt: skip


def read_media(items: Sequence[Item], limits: Limits) -> MediaItems:
    """Return the items of a request that holds more than texts. Raises BadRequest if a limit is exceeded."""
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

    field is the path of an item in the body, with `{}` for its index.
    """
    may_exceed = body_bytes > max_item_bytes  # decoding JSON escapes only shrinks a text
    for index, item in enumerate(items):
        metadata = item.metadata
        if metadata is not _ABSENT:
            _check_metadata(metadata, msgpack, body_bytes, field.format(index))
        if may_exceed:
            num_bytes = len((item.text or "").encode()) + memoryview(metadata).nbytes
            if num_bytes > max_item_bytes:
                raise InputTooLong(
                    f"Field '{field.format(index)}' must hold at most {max_item_bytes} bytes of UTF-8 text",
                    code=BadRequest.code,
                )


def _check_metadata(raw: msgspec.Raw, msgpack: bool, body_bytes: int, field: str) -> None:
    """Raise BadRequest unless metadata is a map with valid UTF-8 texts. Nothing reads its value.

    Only decoding finds the texts in msgpack. Large bodies are not decoded, because 2 MiB of empty maps take 150 MB.
    """
    view = memoryview(raw)
    first = view[0]
    is_map = first & 0xF0 == 0x80 or first in (0xDE, 0xDF, 0xC0) if msgpack else first in b"{n"
    if not is_map:
        raise BadRequest(f"Expected `object | null` - at `$.{field}.metadata`")
    try:
        if not msgpack:
            str(view, "utf-8")
        elif body_bytes <= MAX_FREE_FORM_BYTES:
            decode_typed(_METADATA, bytes(view))
    except UnicodeDecodeError:
        raise BadRequest(f"Invalid UTF-8 in a string - in `$.{field}.metadata`") from None
    except BadRequest as error:
        raise BadRequest(f"{error.message} - in `$.{field}.metadata`") from None


def find_non_text(items: Sequence[Item], *, allows_images: bool = False) -> int | None:
    """Return the index of the first item without a text or with media. allows_images accepts images beside a text."""
    for index, item in enumerate(items):
        if item.text is None or (item.images and not allows_images) or item.audio or item.video or item.document:
            return index
    return None


_to_json = msgspec.json.Encoder().encode


def error_body(error: SieError) -> bytes:
    """Return the native envelope: `{"detail": {code, message, ...extras}}`. Always JSON."""
    return _to_json({"detail": {"code": error.code, "message": error.message, **error.extras}})


def not_found_body(text: str = "Not Found") -> bytes:
    """Return the body of a 404 for an unknown path."""
    return _to_json({"detail": text})


def method_not_allowed_body() -> bytes:
    """Return the body of a 405; the caller adds the `Allow` header."""
    return b'{"detail":"Method Not Allowed"}'
