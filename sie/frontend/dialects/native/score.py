"""Decodes and encodes the bodies of `/v1/score`. Source: SIE API reference, sections 6 and 11.

Requests are read in two steps, as for encode. `decode_score` needs no model. `resolve_score` checks the request against
the model's card.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.native.arrays import pack
from sie.frontend.dialects.native.encode import Item, check_count, check_items, find_non_text
from sie.frontend.inputs.bounded_json import check_json, decode_free_form, decode_typed
from sie.values.inference import ScoreReply, ScoreRequest

_MOST_ITEMS = 65_536  # the setting's upper bound; the setting itself is checked after decoding
_ABSENT = msgspec.Raw(b"")
_to_json = msgspec.json.Encoder().encode


class ScoreBody(msgspec.Struct, gc=False):
    query: Item
    items: Annotated[list[Item], msgspec.Meta(max_length=_MOST_ITEMS)]
    instruction: str | None = None
    options: msgspec.Raw = _ABSENT


class _Score(msgspec.Struct, frozen=True, omit_defaults=True):
    item_id: str
    score: float
    rank: int
    truncated: bool = False


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int


class _ReplyBody(msgspec.Struct, frozen=True):
    model: str
    query_id: str | None
    scores: list[_Score]
    usage: _Usage


_FROM_MSGPACK = msgspec.msgpack.Decoder(ScoreBody)
_FROM_JSON = msgspec.json.Decoder(ScoreBody)


def decode_score(body: bytes, msgpack: bool, model: str, limits: Limits) -> ScoreRequest:
    """Return the request in a score body, with checked shapes and sizes; pass it to `resolve_score` next.

    Unknown fields are ignored. Raises BadRequest (InputTooLong for limits). Its text holds the path of the fault.
    """
    if not msgpack:
        check_json(body, limits.max_depth)
    call = decode_typed(_FROM_MSGPACK if msgpack else _FROM_JSON, body)
    items = call.items
    check_count(items, limits.max_candidates)
    check_items([call.query], msgpack, len(body), limits.max_item_text_bytes, "query")
    check_items(items, msgpack, len(body), limits.max_item_text_bytes)
    non_text = _find_non_text(call)
    ids = [item.id for item in items]
    return ScoreRequest(
        model=model,
        query=call.query.text or "",
        documents=[item.text or "" for item in items] if non_text is None else [],
        query_id=call.query.id,
        ids=ids if any(id_ is not None for id_ in ids) else [],
        instruction=call.instruction,
        options=decode_free_form(call.options, msgpack=msgpack, path="$.options", max_depth=limits.max_depth),
        non_text=non_text,
    )


def _find_non_text(call: ScoreBody) -> str | None:
    """Return the path of the first item without a text to score. Images beside a text are ignored."""
    if find_non_text([call.query], allows_images=True) is not None:
        return "$.query"
    index = find_non_text(call.items, allows_images=True)
    return None if index is None else f"$.items[{index}]"


def encode_scores(request: ScoreRequest, reply: ScoreReply, msgpack: bool) -> bytes:
    """Return the body of a score reply, best first; an item without an id is called `item-<index>`."""
    scores = [
        _Score(
            (request.ids[index] if request.ids else None) or f"item-{index}",
            reply.scores[index],
            rank,
            index in request.cuts,
        )
        for rank, index in enumerate(reply.ranking())
    ]
    body = _ReplyBody(reply.model, request.query_id, scores, _Usage(reply.input_tokens))
    return pack(body) if msgpack else _to_json(body)
