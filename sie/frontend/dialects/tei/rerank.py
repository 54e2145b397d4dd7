"""Decodes and encodes the bodies of `/rerank`, in the form of Text Embeddings Inference. Both are JSON.

A body with `documents` instead of `texts` has the form of vLLM and of Jina, which `sie.frontend.dialects.cohere` reads.
Source: text-embeddings-inference, router/src/http/types.rs and server.rs.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.cohere.rerank import RerankCall, check_texts, decode_rerank, encode_ranking, text_json
from sie.frontend.inputs.bounded_json import check_json, decode_typed
from sie.frontend.inputs.json_parts import without_long_list
from sie.values.errors import Overloaded, SieError, Unavailable
from sie.values.inference import DEFAULT_MODEL, ScoreReply, ScoreRequest

_MOST_TEXTS = 65_536  # the setting's upper bound; the setting itself is checked after decoding
_TOO_MANY = 429
_ABSENT = msgspec.Raw(b"")
_to_json = msgspec.json.Encoder().encode


class TextsBody(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True):
    query: str
    texts: Annotated[list[str], msgspec.Meta(max_length=_MOST_TEXTS)]
    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None
    raw_scores: bool = False
    return_text: bool = False
    top_n: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    """Not a field of the router's; LiteLLM sends it."""


class _Keys(msgspec.Struct, gc=False):
    """The field that tells the form of a body."""

    texts: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT


_DECODER = msgspec.json.Decoder(TextsBody)
_KEYS = msgspec.json.Decoder(_Keys)
Call = TextsBody | RerankCall


def decode_either(body: bytes, limits: Limits) -> tuple[ScoreRequest, Call]:
    """Return the request in a rerank body of either form, and its call; pass it to `resolve_score` next.

    Raises BadRequest (InputTooLong for limits), also for an unknown field.
    """
    check_json(body, limits.max_depth)
    keys = decode_typed(_KEYS, without_long_list(body))
    if memoryview(keys.documents).nbytes and not memoryview(keys.texts).nbytes:
        call = decode_rerank(body, limits)
        return call.request, call
    return decode_texts(decode_typed(_DECODER, body), len(body), limits)


def decode_texts(call: TextsBody, body_bytes: int, limits: Limits) -> tuple[ScoreRequest, TextsBody]:
    """Return the request of a decoded body. Raises BadRequest (InputTooLong for limits)."""
    check_texts({"query": call.query}, "texts", call.texts, body_bytes, limits)
    # Without a choice, a router does as it was started (`auto_truncate`); this server cuts, as on its other routes.
    policy = "error" if call.truncate is False else "truncate_text"
    request = ScoreRequest(
        model=call.model or DEFAULT_MODEL, query=call.query, documents=call.texts, options={"overflow_policy": policy},
        is_raw=True,
    )  # fmt: skip
    return request, call


def repeats_texts(call: Call) -> bool:
    """Tell whether the answer to a call repeats its texts."""
    return call.return_documents if isinstance(call, RerankCall) else call.return_text


def encode_either(request: ScoreRequest, call: Call, reply: ScoreReply) -> bytes:
    """Return the body of a rerank reply in the form of its request."""
    return encode_ranking(call, reply) if isinstance(call, RerankCall) else encode_ranks(request, call, reply)


def encode_ranks(request: ScoreRequest, call: TextsBody, reply: ScoreReply) -> bytes:
    """Return the list of ranks, the best top_n, best first. The scores of pairs are sigmoids, unless the request wants logits."""
    is_plain = call.raw_scores or bool(request.compared)
    ranks: list[dict[str, Any]] = []
    for index in reply.ranking()[: call.top_n]:
        text = {"text": text_json(call.texts[index])} if call.return_text else {}
        score = reply.scores[index]
        ranks.append({"index": index, **text, "score": score if is_plain else _sigmoid(score)})
    return _to_json(ranks)


def _sigmoid(number: float) -> float:
    part = math.exp(-abs(number))
    return (1 if number >= 0 else part) / (1 + part)


def error_body(error: SieError) -> bytes:
    """Return the router's error, `{"error", "error_type"}`, with our code beside them."""
    return _to_json({"error": error.message, "error_type": _error_type(error), "code": error.code})


def _error_type(error: SieError) -> str:
    if error.http_status == _TOO_MANY or error.code == Overloaded.code:
        return "Overloaded"
    if error.http_status < 500:
        return "Validation"
    return "Unhealthy" if isinstance(error, Unavailable) else "Backend"
