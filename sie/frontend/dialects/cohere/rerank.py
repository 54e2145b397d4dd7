"""Decodes and encodes the bodies of `/v1/rerank`, in the form of Cohere's first version and of Jina.

Both are JSON. Errors have OpenAI's envelope and SIE's codes. A document is a text or an object with one, and an answer
counts its tokens under Jina's name, too.

Source: SIE API reference, section 10; Jina's reranker API.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from sie.config.limits import Limits
from sie.frontend.dialects.openai.embeddings import error_object, field_of
from sie.frontend.inputs.bounded_json import check_json, decode_free_form, decode_typed
from sie.values.errors import BadRequest, InputTooLong, NotFound, SieError
from sie.values.inference import ScoreReply, ScoreRequest

_MOST_DOCUMENTS = 65_536  # the setting's upper bound; the setting itself is checked after decoding
_ABSENT = msgspec.Raw(b"")
_to_json = msgspec.json.Encoder().encode


class TextDocument(msgspec.Struct, gc=False):
    text: str


class RerankBody(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True):
    model: str
    query: str
    documents: Annotated[list[str | TextDocument], msgspec.Meta(max_length=_MOST_DOCUMENTS)]
    top_n: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    max_doc_length: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    options: msgspec.Raw = _ABSENT


class RerankCall(msgspec.Struct, frozen=True):
    """A decoded request and the requested part of the ranking. top_n None means the whole ranking."""

    request: ScoreRequest
    top_n: int | None
    return_documents: bool


_DECODER = msgspec.json.Decoder(RerankBody)


def decode_rerank(body: bytes, limits: Limits) -> RerankCall:
    """Return the request in a rerank body; pass its `request` to `resolve_score` next.

    Raises BadRequest (InputTooLong for limits), also for an unknown field.
    """
    check_json(body, limits.max_depth)
    try:
        call = decode_typed(_DECODER, body)
    except BadRequest as error:
        raise BadRequest(error.message, extras={"param": field_of(error.message)}) from None
    documents = [one if isinstance(one, str) else one.text for one in call.documents]
    check_texts({"model": call.model, "query": call.query}, "documents", documents, len(body), limits)
    options = decode_free_form(call.options, msgpack=False, path="$.options", max_depth=limits.max_depth)
    request = ScoreRequest(
        model=call.model,
        query=call.query,
        documents=documents,
        options=options,
        max_document_tokens=call.max_doc_length,
    )
    return RerankCall(request, call.top_n, bool(call.return_documents))


def check_texts(named: dict[str, str], field: str, documents: list[str], body_bytes: int, limits: Limits) -> None:
    """Check the texts of a rerank request: named ones by field, and the documents, which are in another field.

    Raises BadRequest for an empty text by name, and for no documents or too many; InputTooLong for a text's size.
    """
    for name, text in named.items():
        if not text.strip():
            raise BadRequest(f"Field '{name}' must not be empty", extras={"param": name})
    if not documents:
        raise BadRequest(f"Field '{field}' must not be empty", extras={"param": field})
    if len(documents) > limits.max_candidates:
        raise BadRequest(
            f"Field '{field}' must hold at most {limits.max_candidates} entries, got {len(documents)}; "
            "split the request",
            extras={"param": field},
        )
    max_bytes = limits.max_item_text_bytes
    if body_bytes <= max_bytes:  # decoding JSON escapes only shrinks a text, so none can be longer
        return
    for name, text in [*named.items(), *((f"{field}[{i}]", text) for i, text in enumerate(documents))]:
        if len(text.encode()) > max_bytes:
            raise InputTooLong(f"Field '{name}' must hold at most {max_bytes} bytes of UTF-8 text")


def error_body(error: SieError) -> bytes:
    """Return `{"error": {message, type, param, code, ...}, "message"}` with SIE's code."""
    described = {**error_object(error), "code": error.code}
    if error.code == NotFound.code:
        described["param"] = "model"
    return _to_json({"error": described, "message": error.message})


def text_json(text: str) -> msgspec.Raw:
    """Return a text of an answer as JSON, encoded separately so that other threads run between two long texts."""
    return msgspec.Raw(_to_json(text))


def encode_ranking(call: RerankCall, reply: ScoreReply) -> bytes:
    """Return the body of a rerank reply: the best top_n documents, best first."""
    results: list[dict[str, Any]] = []
    for index in reply.ranking()[: call.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": reply.scores[index]}
        if call.return_documents:
            result["document"] = {"text": text_json(call.request.documents[index])}
        if index in call.request.cuts:
            result["truncated"] = True
        results.append(result)
    usage = {"input_tokens": reply.input_tokens, "total_tokens": reply.input_tokens}
    return _to_json({"model": reply.model, "results": results, "usage": usage})
