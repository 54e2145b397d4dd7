"""Decodes and encodes the bodies of `/v1/extract`. Source: SIE API reference, sections 7, 11, 12 and 19.

Requests are read in two steps, as for encode. `decode_extract` needs no model. `resolve_extract` checks the request
against the model's card.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.native.arrays import pack
from sie.frontend.dialects.native.encode import Item, check_count, check_items, find_non_text, read_media
from sie.frontend.inputs.bounded_json import check_json, children_of, decode_free_form, decode_typed
from sie.frontend.operations.resolve_extract import OPTIONS_PATH
from sie.values.errors import BadRequest, InputTooLong
from sie.values.extract import Entity, Extraction
from sie.values.inference import ExtractReply, ExtractRequest

_MOST_ITEMS = 65_536  # the setting's upper bound; the setting itself is checked after decoding
_MAX_SCHEMA_BYTES: Final = 1 << 20
_MAX_SCHEMA_HEADS: Final = 1 << 18
"""Most bytes of a msgpack schema that may start a map or a list: an empty one has one byte, and takes 64 bytes decoded."""
_NOT_HEADS: Final = bytes(set(range(256)) - {*range(0x80, 0xA0), *range(0xDC, 0xE0)})
_SCHEMA_LEVEL: Final = 2
"""Nesting levels of a body above its output_schema."""
_ABSENT = msgspec.Raw(b"")
_to_json = msgspec.json.Encoder().encode


class ExtractItem(Item, gc=False):
    text_pair: str | None = None


class ExtractParams(msgspec.Struct, gc=False):
    labels: Annotated[list[str], msgspec.Meta(max_length=_MOST_ITEMS)] | None = None
    output_schema: msgspec.Raw = _ABSENT
    instruction: str | None = None
    options: msgspec.Raw = _ABSENT


class ExtractBody(msgspec.Struct, gc=False):
    items: Annotated[list[ExtractItem], msgspec.Meta(max_length=_MOST_ITEMS)]
    params: ExtractParams | None = None


_FROM_MSGPACK = msgspec.msgpack.Decoder(ExtractBody)
_FROM_JSON = msgspec.json.Decoder(ExtractBody)


def _refuse_extension(code: int, _data: memoryview) -> Any:
    raise msgspec.ValidationError(f"A msgpack extension type ({code}) has no form in JSON")


_SCHEMA_FROM_MSGPACK = msgspec.msgpack.Decoder(dict[str, Any] | None, ext_hook=_refuse_extension)
_SCHEMA_FROM_JSON = msgspec.json.Decoder(dict[str, Any] | None)
_NO_PARAMS = ExtractParams()


def decode_extract(body: bytes, msgpack: bool, model: str, limits: Limits) -> ExtractRequest:
    """Return the request in an extract body, with checked shapes and sizes; pass it to `resolve_extract` next.

    Unknown fields are ignored. Raises BadRequest (InputTooLong for limits). Its text holds the path of the fault.
    """
    if not msgpack:
        check_json(body, max(limits.max_depth, limits.max_schema_depth + _SCHEMA_LEVEL))
    call = decode_typed(_FROM_MSGPACK if msgpack else _FROM_JSON, body)
    items, params = call.items, call.params or _NO_PARAMS
    check_count(items, limits.max_items)
    check_items(items, msgpack, len(body), limits.max_item_text_bytes)
    pairs = _read_pairs(items, len(body), limits.max_item_text_bytes)
    labels = params.labels or []
    if len(labels) > limits.max_labels:
        raise BadRequest(f"Field 'params.labels' must hold at most {limits.max_labels} labels, got {len(labels)}")
    non_text = find_non_text(items)
    ids = [item.id for item in items]
    return ExtractRequest(
        model=model,
        texts=[item.text or "" for item in items] if non_text is None else [],
        ids=ids if any(id_ is not None for id_ in ids) else [],
        labels=tuple(labels),
        output_schema=_decode_schema(params.output_schema, msgpack, limits),
        instruction=params.instruction,
        options=decode_free_form(params.options, msgpack=msgpack, path=OPTIONS_PATH, max_depth=limits.max_depth),
        pairs=pairs,
        metadata={index: item.metadata for index, item in enumerate(items) if memoryview(item.metadata).nbytes},
        is_msgpack=msgpack,
        non_text_item=non_text,
        media=None if non_text is None else read_media(items, limits),
    )


def _read_pairs(items: list[ExtractItem], body_bytes: int, max_bytes: int) -> dict[int, str]:
    """Return the second texts by item number. Raises InputTooLong for a text over max_bytes of UTF-8."""
    pairs = {index: item.text_pair for index, item in enumerate(items) if item.text_pair is not None}
    for index, text in pairs.items() if body_bytes > max_bytes else ():
        if len(text.encode()) > max_bytes:
            raise InputTooLong(
                f"Field 'items[{index}].text_pair' must hold at most {max_bytes} bytes of UTF-8 text",
                code=BadRequest.code,
            )
    return pairs


def _decode_schema(raw: msgspec.Raw, msgpack: bool, limits: Limits) -> str:
    """Return a schema as JSON, with checked depth and number of values; '' if it is absent, null or empty."""
    view = memoryview(raw)
    if not view.nbytes:
        return ""
    if view.nbytes > _MAX_SCHEMA_BYTES:
        raise BadRequest(f"Field 'params.output_schema' must hold at most {_MAX_SCHEMA_BYTES} bytes")
    body = bytes(view)
    if msgpack:
        _check_heads(body, limits)
    try:
        schema = decode_typed(_SCHEMA_FROM_MSGPACK if msgpack else _SCHEMA_FROM_JSON, body)
    except BadRequest as error:
        raise BadRequest(f"{error.message} - in `$.params.output_schema`") from None
    if not schema:
        return ""
    _check_schema(schema, limits)
    return _to_json(schema).decode()


def _check_heads(schema: bytes, limits: Limits) -> None:
    """Raise BadRequest for a msgpack schema that might hold so many maps and lists that decoding it stops other threads.

    Bytes of texts that are not ASCII look like them, so the bound is far above the number of values in a schema.
    """
    most = max(_MAX_SCHEMA_HEADS, limits.max_schema_values)
    if len(schema.translate(None, _NOT_HEADS)) > most:
        raise BadRequest(f"Field 'params.output_schema' has over {most} bytes that may be maps or lists")


def _check_schema(schema: dict[str, Any], limits: Limits) -> None:
    depth = num_values = 0
    level: list[Any] = [schema]
    while level:
        num_values += len(level)
        depth += any(isinstance(value, dict | list) for value in level)
        if depth > limits.max_schema_depth:
            raise BadRequest(f"Field 'params.output_schema' is nested deeper than {limits.max_schema_depth} levels")
        if num_values > limits.max_schema_values:
            raise BadRequest(f"Field 'params.output_schema' must hold at most {limits.max_schema_values} values")
        level = [child for value in level for child in children_of(value)]


class EntityBody(msgspec.Struct, frozen=True):
    text: str
    label: str
    score: float
    start: int | None
    end: int | None
    bbox: tuple[int, int, int, int] | None


class _Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    input_tokens: int
    images: int = 0


class _ReplyBody(msgspec.Struct, frozen=True):
    model: str
    items: list[dict[str, Any]]
    usage: _Usage


def encode_extractions(request: ExtractRequest, reply: ExtractReply, msgpack: bool) -> bytes:
    """Return the body of an extract reply.

    Every result has every key, but `error` only if there is an error, and `truncated` only if the text was truncated.
    An item without an id is called `item-<index>`.
    """
    items = [
        _item((request.ids[index] if request.ids else None) or f"item-{index}", found)
        for index, found in enumerate(reply.extractions)
    ]
    for index in request.cuts:
        items[index]["truncated"] = True
    body = _ReplyBody(reply.model, items, _Usage(reply.input_tokens, reply.num_images))
    return pack(body) if msgpack else _to_json(body)


def _item(id_: str, found: Extraction) -> dict[str, Any]:
    item: dict[str, Any] = {
        "id": id_,
        "entities": [_entity(entity) for entity in found.entities],
        "relations": [msgspec.structs.asdict(relation) for relation in found.relations],
        "classifications": [msgspec.structs.asdict(classification) for classification in found.classifications],
        "objects": [msgspec.structs.asdict(detected) for detected in found.objects],
        "data": found.data,
    }
    if found.error is not None:
        item["error"] = msgspec.structs.asdict(found.error)
    return item


def _entity(entity: Entity) -> EntityBody:
    return EntityBody(entity.text or "", entity.label, entity.score, entity.start, entity.end, entity.bbox)
