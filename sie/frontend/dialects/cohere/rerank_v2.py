"""Decodes and encodes the bodies of `/v2/rerank`, in the form of Cohere's second version. Both are JSON.

Source: Cohere's API reference, v2 rerank; cohere 7.3, `v2/raw_client.py`. vLLM serves the same route with documents that
may be objects. LiteLLM sends `return_documents`, which version 1 defines.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.cohere.rerank import RerankCall, TextDocument, check_texts, text_json
from sie.frontend.inputs.bounded_json import check_json, decode_typed
from sie.values.errors import SieError
from sie.values.inference import ScoreReply, ScoreRequest

_MOST_DOCUMENTS = 65_536  # the setting's upper bound; the setting itself is checked after decoding
_to_json = msgspec.json.Encoder().encode


class RelevantSpans(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    mode: Literal["disabled"]


class RerankV2Body(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True):
    model: str
    query: str
    documents: Annotated[list[str | TextDocument], msgspec.Meta(max_length=_MOST_DOCUMENTS)]
    return_documents: bool | None = None
    top_n: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    max_tokens_per_doc: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    priority: Literal[0] | None = None
    relevant_spans: RelevantSpans | None = None


_DECODER = msgspec.json.Decoder(RerankV2Body)


def decode_rerank_v2(body: bytes, limits: Limits) -> RerankCall:
    """Return the request in a rerank body; pass its `request` to `resolve_score` next.

    Raises BadRequest (InputTooLong for limits), also for an unknown field.
    """
    check_json(body, limits.max_depth)
    call = decode_typed(_DECODER, body)
    documents = [one if isinstance(one, str) else one.text for one in call.documents]
    check_texts({"model": call.model, "query": call.query}, "documents", documents, len(body), limits)
    request = ScoreRequest(
        model=call.model, query=call.query, documents=documents, max_document_tokens=call.max_tokens_per_doc
    )
    return RerankCall(request, call.top_n, bool(call.return_documents))


def encode_ranking_v2(call: RerankCall, reply: ScoreReply) -> bytes:
    """Return the body of a rerank reply: the best top_n documents, best first."""
    results: list[dict[str, Any]] = []
    for index in reply.ranking()[: call.top_n]:
        document = {"document": {"text": text_json(call.request.documents[index])}} if call.return_documents else {}
        results.append({"index": index, **document, "relevance_score": reply.scores[index]})
    meta: dict[str, Any] = {"api_version": {"version": "2"}, "tokens": {"input_tokens": reply.input_tokens}}
    return _to_json({"id": str(uuid4()), "results": results, "meta": meta})


def error_body_v2(error: SieError) -> bytes:
    """Return Cohere's error, `{"id", "message"}`, with our code beside them."""
    return _to_json({"id": str(uuid4()), "message": error.message, "code": error.code})
