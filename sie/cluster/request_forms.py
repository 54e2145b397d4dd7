"""Cuts checked requests into work items, and makes a request of one item again on a host. Pure.

A host runs each item as a request of its own: the worker's steps join them, wherever they came from.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sie.cluster.payloads import EncodeItem, ExtractItem, ItemOperation, ScoreItem
from sie.values.errors import ProtocolError
from sie.values.inference import EncodeRequest, ExtractRequest, ScoreRequest

Request = EncodeRequest | ScoreRequest | ExtractRequest
_encode: Final = msgspec.msgpack.Encoder().encode
_encode_item_decoder: Final = msgspec.msgpack.Decoder(EncodeItem)
_score_item_decoder: Final = msgspec.msgpack.Decoder(ScoreItem)
_extract_item_decoder: Final = msgspec.msgpack.Decoder(ExtractItem)


def encode_items(request: EncodeRequest) -> list[bytes]:
    """Return the body of each input of a request that is resolved against its card."""
    images = request.images or {}
    texts, lists = request.texts, request.token_lists
    num_items = len(texts if texts is not None else lists or ())
    return [
        _encode(
            EncodeItem(
                texts[item] if texts is not None and item not in images else None,
                lists[item] if lists is not None else None,
                images.get(item), request.output_types, request.output_dtype, request.instruction, request.dimensions,
                request.options, request.muvera,
            )
        )
        for item in range(num_items)
    ]  # fmt: skip


def score_item(request: ScoreRequest) -> bytes:
    """Return the body of a whole request to score."""
    return _encode(ScoreItem(request.query, request.documents, request.instruction, request.options, request.compared))


def extract_items(request: ExtractRequest) -> list[bytes]:
    """Return the body of each input of a request that is resolved against its card."""
    images = request.images or {}
    return [
        _encode(ExtractItem(text, images.get(item), request.options, request.task))
        for item, text in enumerate(request.texts)
    ]


def read_item(operation: ItemOperation, model: str, body: bytes | memoryview) -> Request:
    """Return the request of one work item. Raises ProtocolError."""
    try:
        match operation:
            case "encode":
                return _encode_request(model, _encode_item_decoder.decode(body))
            case "score":
                return _score_request(model, _score_item_decoder.decode(body))
            case "extract":
                return _extract_request(model, _extract_item_decoder.decode(body))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a work item that cannot be decoded: {error}") from error


def _encode_request(model: str, item: EncodeItem) -> EncodeRequest:
    images = {0: item.images} if item.images is not None else None
    texts = None if item.tokens is not None else [item.text or ""]
    return EncodeRequest(
        model=model, texts=texts, token_lists=[item.tokens] if item.tokens is not None else None,
        output_types=item.output_types, output_dtype=item.output_dtype, instruction=item.instruction,
        dimensions=item.dimensions, options=item.options, images=images, muvera=item.muvera,
    )  # fmt: skip


def _score_request(model: str, item: ScoreItem) -> ScoreRequest:
    return ScoreRequest(
        model=model, query=item.query, documents=item.documents, instruction=item.instruction, options=item.options,
        compared=item.compared,
    )  # fmt: skip


def _extract_request(model: str, item: ExtractItem) -> ExtractRequest:
    images = {0: item.images} if item.images is not None else None
    return ExtractRequest(model=model, texts=[item.text], options=item.options, task=item.task, images=images)
