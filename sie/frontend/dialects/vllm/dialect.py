"""Describes vLLM's routes of pooling models."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.description import Codec, Dialect, Envelope, json_failure, operation_row
from sie.frontend.dialects.vllm import openapi
from sie.frontend.dialects.vllm.classify import decode_classify, encode_classes
from sie.frontend.dialects.vllm.pooling_fields import error_body
from sie.frontend.dialects.vllm.score import decode_pairs, encode_pair_scores

_CLASSIFY: Final = Codec(
    operation="extract",
    decode=lambda body, _sent, limits: (decode_classify(body, limits), None),
    encode=lambda _request, _shown, reply, _msgpack: encode_classes(reply),
    default_output="extract",
)
_SCORE: Final = Codec(
    operation="score",
    decode=lambda body, _sent, limits: (decode_pairs(body, limits), None),
    encode=lambda _request, _shown, reply, _msgpack: encode_pair_scores(reply),
    default_output="score",
)
DIALECT: Final = Dialect(
    rows=(
        operation_row("/classify", _CLASSIFY, "vllm", "extract"),
        operation_row("/score", _SCORE, "vllm", "score"),
    ),
    operations=openapi.OPERATIONS,
    envelopes={"vllm": Envelope(failure=json_failure(error_body), error=openapi.PoolingError)},
    roots={"/classify": "vllm", "/score": "vllm"},
)
