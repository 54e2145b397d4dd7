"""Describes Cohere's rerank API."""

from __future__ import annotations

from typing import Final

from sie.config.limits import Limits
from sie.frontend.dialects.cohere import openapi
from sie.frontend.dialects.cohere.rerank import RerankCall, decode_rerank, encode_ranking, error_body
from sie.frontend.dialects.cohere.rerank_v2 import decode_rerank_v2, encode_ranking_v2, error_body_v2
from sie.frontend.dialects.description import Codec, Dialect, Envelope, Sent, json_failure, operation_row
from sie.frontend.dialects.openai.openapi import OpenAIError
from sie.values.inference import ScoreReply, ScoreRequest


def _decode(body: bytes, _sent: Sent, limits: Limits) -> tuple[ScoreRequest, RerankCall]:
    call = decode_rerank(body, limits)
    return call.request, call


def _encode(_request: ScoreRequest, call: RerankCall, reply: ScoreReply, _msgpack: bool) -> bytes:
    return encode_ranking(call, reply)


def _decode_v2(body: bytes, _sent: Sent, limits: Limits) -> tuple[ScoreRequest, RerankCall]:
    call = decode_rerank_v2(body, limits)
    return call.request, call


_RERANK: Final = Codec(
    operation="score", decode=_decode, encode=_encode, default_output="score",
    is_quick=lambda call, _msgpack: not call.return_documents,
)  # fmt: skip
_RERANK_V2: Final = Codec(
    operation="score",
    decode=_decode_v2,
    encode=lambda _request, call, reply, _msgpack: encode_ranking_v2(call, reply),
    default_output="score",
    is_quick=lambda call, _msgpack: not call.return_documents,
)
DIALECT: Final = Dialect(
    rows=(
        operation_row("/v1/rerank", _RERANK, "rerank", "score"),
        operation_row("/v2/rerank", _RERANK_V2, "cohere", "score"),
    ),
    operations=openapi.OPERATIONS,
    envelopes={
        "rerank": Envelope(failure=json_failure(error_body), error=OpenAIError),
        "cohere": Envelope(failure=json_failure(error_body_v2), error=openapi.CohereError),
    },
    roots={"/v1/rerank": "rerank", "/v2/rerank": "cohere"},
)
