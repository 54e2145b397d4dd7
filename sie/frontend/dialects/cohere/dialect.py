"""Describes Cohere's rerank API."""

from __future__ import annotations

from typing import Final

from sie.config.limits import Limits
from sie.frontend.dialects.cohere import openapi
from sie.frontend.dialects.cohere.rerank import RerankCall, decode_rerank, encode_ranking, error_body
from sie.frontend.dialects.description import Codec, Dialect, Envelope, Sent, json_failure, operation_row
from sie.frontend.dialects.openai.openapi import OpenAIError
from sie.values.inference import ScoreReply, ScoreRequest


def _decode(body: bytes, _sent: Sent, limits: Limits) -> tuple[ScoreRequest, RerankCall]:
    call = decode_rerank(body, limits)
    return call.request, call


def _encode(_request: ScoreRequest, call: RerankCall, reply: ScoreReply, _msgpack: bool) -> bytes:
    return encode_ranking(call, reply)


_RERANK: Final = Codec(operation="score", decode=_decode, encode=_encode, default_output="score")
DIALECT: Final = Dialect(
    rows=(operation_row("/v1/rerank", _RERANK, "rerank", "score"),),
    operations=openapi.OPERATIONS,
    envelopes={"rerank": Envelope(failure=json_failure(error_body), error=OpenAIError)},
    roots={"/v1/rerank": "rerank"},
)
