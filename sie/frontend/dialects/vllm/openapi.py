"""Defines the OpenAPI rows of vLLM's routes of pooling models, and the types of their answers and errors."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from sie.frontend.dialects.openai.openapi import EMBEDDINGS_FAULTS
from sie.frontend.dialects.operation import INFERENCE, POISON, Answer, Operation, Reply
from sie.frontend.dialects.vllm.classify import ClassifyBody
from sie.frontend.dialects.vllm.score import PairsBody


class PoolingUsage(Reply):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: Literal[0]
    prompt_tokens_details: None


class ClassifyData(Reply):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyData]
    usage: PoolingUsage


class PairScore(Reply):
    index: int
    object: Literal["score"]
    score: float


class PairsAnswer(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PoolingUsage


class PoolingErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    code: int
    param: str | None = None


class PoolingError(Struct, kw_only=True):
    error: PoolingErrorDetail


_FAULTS: Final = tuple(POISON if fault.status == POISON.status else fault for fault in EMBEDDINGS_FAULTS)

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/classify",
        tag=INFERENCE,
        summary="Scores of a classifier's classes",
        description="In vLLM's form, for any sequence classifier with classes. The request waits for a model that is loading.",
        request=ClassifyBody,
        example={"model": "default", "input": ["A quick brown fox"]},
        answers=(Answer(200, "The classes of each text.", type=ClassifyAnswer),),
        faults=_FAULTS,
        has_timing=True,
        may_cut=True,
    ),
    Operation(
        template="/score",
        tag=INFERENCE,
        summary="Scores of pairs of texts",
        description="In vLLM's form. One text is paired with each of the others, or as many with as many, in order.",
        request=PairsBody,
        example={"model": "default", "queries": "what is a fox?", "documents": ["A quick brown fox", "A stone"]},
        answers=(Answer(200, "A score for each pair, in order.", type=PairsAnswer),),
        faults=_FAULTS,
        has_timing=True,
        may_cut=True,
    ),
)
