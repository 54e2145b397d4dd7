"""Defines the OpenAPI row of `/rerank`, and the types of its error."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from sie.frontend.dialects.openai.openapi import EMBEDDINGS_FAULTS
from sie.frontend.dialects.operation import INFERENCE, POISON, Answer, Operation
from sie.frontend.dialects.tei.rerank import TextsBody


class RouterError(Struct, kw_only=True):
    error: str
    error_type: str
    code: str


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/rerank",
        tag=INFERENCE,
        summary="Texts ranked for a query",
        description=(
            "In the form of Text Embeddings Inference: a list of `index`, `score` and perhaps `text`, best first. "
            "A body with `documents` instead of `texts` is read and answered as on `/v1/rerank`."
        ),
        request=TextsBody,
        example={"query": "what is a fox?", "texts": ["A quick brown fox", "A stone"]},
        answers=(Answer(200, "The texts, best first.", is_list=True),),
        faults=tuple(POISON if fault.status == POISON.status else fault for fault in EMBEDDINGS_FAULTS),
        has_timing=True,
        may_cut=True,
    ),
)
