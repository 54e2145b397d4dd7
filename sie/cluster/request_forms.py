"""Cuts checked requests into work items, and makes a request of one item again on a host. Pure.

A host runs each item as a request of its own: the worker's steps join them, wherever they came from. Short texts of one
request stay together, since each item costs processor time whatever its size; long ones may run on several hosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from sie.cluster.payloads import EncodeItem, ExtractItem, ItemOperation, ScoreItem
from sie.values.errors import ProtocolError
from sie.values.inference import EncodeRequest, ExtractRequest, ScoreRequest

Request = EncodeRequest | ScoreRequest | ExtractRequest
_encode: Final = msgspec.msgpack.Encoder().encode
_encode_item_decoder: Final = msgspec.msgpack.Decoder(EncodeItem)
_score_item_decoder: Final = msgspec.msgpack.Decoder(ScoreItem)
_extract_item_decoder: Final = msgspec.msgpack.Decoder(ExtractItem)
_ITEM_BYTES: Final = 1024
"""The most text of several inputs in one item: about a quarter of the tokens of a step on a CPU, so that steps are full."""
_MAX_INPUTS: Final = 16
_TOKEN_BYTES: Final = 4
"""Bytes of text that a token counts as."""


class Piece(NamedTuple):
    """The body of one work item, and the number of its first input in the request."""

    body: bytes
    first: int = 0


def encode_items(request: EncodeRequest) -> list[Piece]:
    """Return the work items of a request that is resolved against its card."""
    images = request.images or {}
    texts, lists = request.texts, request.token_lists
    sizes = [len(text) for text in texts] if texts is not None else [_TOKEN_BYTES * len(one) for one in lists or ()]
    return [
        Piece(
            _encode(
                EncodeItem(
                    texts[start:end] if texts is not None and start not in images else None,
                    lists[start:end] if lists is not None else None,
                    images.get(start), request.output_types, request.output_dtype, request.instruction,
                    request.dimensions, request.options, request.muvera,
                )
            ),
            start,
        )
        for start, end in _runs(sizes, images)
    ]  # fmt: skip


def _runs(sizes: Sequence[int], alone: dict[int, Any]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each run of inputs that are one item, in order."""
    start = num_bytes = 0
    for number, size in enumerate(sizes):
        num_bytes += size
        is_full = num_bytes > _ITEM_BYTES or number - start == _MAX_INPUTS
        if number > start and (is_full or number in alone or start in alone):
            yield start, number
            start, num_bytes = number, size
    if sizes:
        yield start, len(sizes)


def score_item(request: ScoreRequest) -> bytes:
    """Return the body of a whole request to score."""
    return _encode(ScoreItem(request.query, request.documents, request.instruction, request.options, request.compared))


def extract_items(request: ExtractRequest) -> list[Piece]:
    """Return the work item of each input of a request that is resolved against its card."""
    images = request.images or {}
    return [
        Piece(
            _encode(ExtractItem(text, images.get(item), request.options, request.task, request.given.get(item, ()))),
            item,
        )
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
    texts = item.texts if item.images is None else [""]
    return EncodeRequest(
        model=model, texts=texts, token_lists=item.token_lists,
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
    return ExtractRequest(
        model=model, texts=[item.text], options=item.options, task=item.task, images=images, given={0: item.given}
    )
