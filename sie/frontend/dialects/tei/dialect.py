"""Describes the rerank API of Text Embeddings Inference."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.description import Codec, Dialect, Envelope, json_failure, operation_row
from sie.frontend.dialects.tei import openapi
from sie.frontend.dialects.tei.rerank import decode_either, encode_either, error_body, repeats_texts

_RERANK: Final = Codec(
    operation="score",
    decode=lambda body, _sent, limits: decode_either(body, limits),
    encode=lambda request, call, reply, _msgpack: encode_either(request, call, reply),
    default_output="score",
    is_quick=lambda call, _msgpack: not repeats_texts(call),
)
DIALECT: Final = Dialect(
    rows=(operation_row("/rerank", _RERANK, "tei", "score"),),
    operations=openapi.OPERATIONS,
    envelopes={"tei": Envelope(failure=json_failure(error_body), error=openapi.RouterError)},
    roots={"/rerank": "tei"},
)
