"""Defines the OpenAPI row of `/v1/rerank`, and the types of its answer."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import UNSET, UnsetType

from sie.frontend.dialects.cohere.rerank import RerankBody
from sie.frontend.dialects.openai.openapi import EMBEDDINGS_FAULTS
from sie.frontend.dialects.operation import INFERENCE, POISON, Answer, Operation, Reply, Usage


class RerankDocument(Reply):
    text: str


class RerankResult(Reply):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET
    truncated: Literal[True] | UnsetType = UNSET


class RerankAnswer(Reply):
    model: str
    results: list[RerankResult]
    usage: Usage


OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/rerank",
        tag=INFERENCE,
        summary="Documents ranked for a query",
        description="In Cohere's form. The request waits for a model that is loading.",
        request=RerankBody,
        example={
            "model": "default",
            "query": "what is a fox?",
            "documents": ["A quick brown fox", "A stone"],
            "top_n": 1,
        },
        answers=(Answer(200, "The best documents, best first.", type=RerankAnswer),),
        faults=tuple(POISON if fault.status == POISON.status else fault for fault in EMBEDDINGS_FAULTS),
        has_timing=True,
        may_cut=True,
    ),
)
