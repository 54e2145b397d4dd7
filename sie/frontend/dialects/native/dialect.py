"""Describes the native SIE API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from sie.config.limits import Limits
from sie.frontend.dialects.description import (
    Codec,
    Dialect,
    Envelope,
    Sent,
    json_failure,
    not_found_text,
    operation_row,
)
from sie.frontend.dialects.native import encode, encode_reply, extract, openapi, score
from sie.frontend.dialects.native.negotiate import is_msgpack
from sie.frontend.http.response import JSON, Response

RequestT = TypeVar("RequestT")


def _reader(
    decode: Callable[[bytes, bool, str, Limits], RequestT],
) -> Callable[[bytes, Sent, Limits], tuple[RequestT, None]]:
    def read(body: bytes, sent: Sent, limits: Limits) -> tuple[RequestT, None]:
        return decode(body, is_msgpack(sent.content_type), sent.model, limits), None

    return read


_ENCODE: Final = Codec(
    operation="encode",
    decode=_reader(encode.decode_encode),
    encode=lambda _request, _shown, reply, msgpack: encode_reply.encode_reply(reply, msgpack),
    is_quick=lambda _shown, msgpack: msgpack,
    has_msgpack=True,
)
_SCORE: Final = Codec(
    operation="score",
    decode=_reader(score.decode_score),
    encode=lambda request, _shown, reply, msgpack: score.encode_scores(request, reply, msgpack),
    has_msgpack=True,
)
_EXTRACT: Final = Codec(
    operation="extract",
    decode=_reader(extract.decode_extract),
    encode=lambda request, _shown, reply, msgpack: extract.encode_extractions(request, reply, msgpack),
    has_msgpack=True,
)

ENCODE: Final = operation_row("/v1/encode/{model}", _ENCODE, "sie", "encode")
"""The route has a fast path."""
DIALECT: Final = Dialect(
    rows=(
        ENCODE,
        operation_row("/v1/score/{model}", _SCORE, "sie", "score"),
        operation_row("/v1/extract/{model}", _EXTRACT, "sie", "extract"),
    ),
    operations=openapi.OPERATIONS,
    tags=openapi.TAGS,
    envelopes={
        "sie": Envelope(
            failure=json_failure(encode.error_body),
            unknown_path=lambda _path, hint: Response(404, [JSON], encode.not_found_body(not_found_text(hint))),
            wrong_method=lambda _template, _methods: Response(405, [JSON], encode.method_not_allowed_body()),
            error=openapi.NativeError,
        )
    },
)
