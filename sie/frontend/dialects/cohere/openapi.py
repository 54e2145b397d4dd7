"""Defines the OpenAPI rows of Cohere's rerank routes, and the types of their answers."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.cohere.rerank import RerankBody
from sie.frontend.dialects.cohere.rerank_v2 import RerankV2Body
from sie.frontend.dialects.openai.openapi import EMBEDDINGS_FAULTS
from sie.frontend.dialects.operation import INFERENCE, POISON, Answer, Operation, Reply


class RerankDocument(Reply):
    text: str


class RerankResult(Reply):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET
    truncated: Literal[True] | UnsetType = UNSET


class RerankUsage(Reply):
    input_tokens: int
    total_tokens: int


class RerankAnswer(Reply):
    model: str
    results: list[RerankResult]
    usage: RerankUsage


class RerankV2Result(Reply):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankVersion(Reply):
    version: Literal["2"]


class RerankTokens(Reply):
    input_tokens: int


class RerankMeta(Reply):
    api_version: RerankVersion
    tokens: RerankTokens


class RerankV2Answer(Reply):
    id: str
    results: list[RerankV2Result]
    meta: RerankMeta


class CohereError(Struct, kw_only=True):
    id: str
    message: str
    code: str


_FAULTS: Final = tuple(POISON if fault.status == POISON.status else fault for fault in EMBEDDINGS_FAULTS)
OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/rerank",
        tag=INFERENCE,
        summary="Documents ranked for a query",
        description="In the form of Cohere's first version and of Jina. The request waits for a model that is loading.",
        request=RerankBody,
        example={
            "model": "default",
            "query": "what is a fox?",
            "documents": ["A quick brown fox", "A stone"],
            "top_n": 1,
        },
        answers=(Answer(200, "The best documents, best first.", type=RerankAnswer),),
        faults=_FAULTS,
        has_timing=True,
        may_cut=True,
    ),
    Operation(
        template="/v2/rerank",
        tag=INFERENCE,
        summary="Documents ranked for a query, version 2",
        description="In the form of Cohere's second version. The request waits for a model that is loading.",
        request=RerankV2Body,
        example={"model": "default", "query": "what is a fox?", "documents": ["A quick brown fox", "A stone"]},
        answers=(Answer(200, "The best documents, best first.", type=RerankV2Answer),),
        faults=_FAULTS,
        has_timing=True,
        may_cut=True,
    ),
)
