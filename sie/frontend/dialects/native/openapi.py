"""Defines the OpenAPI rows of the native SIE API, and the types of its answers and errors.

The types describe JSON. In msgpack, arrays of numbers are maps (`sie.frontend.dialects.native.arrays`) and base64
texts are bytes. Tests check live answers against these types. Source of `/v1/generate`: SIE API reference, section 10.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.native.encode import EncodeBody
from sie.frontend.dialects.native.encode_reply import TimingBody
from sie.frontend.dialects.native.extract import EntityBody, ExtractBody
from sie.frontend.dialects.native.generate import GenerateBody
from sie.frontend.dialects.native.negotiate import MSGPACK
from sie.frontend.dialects.native.score import ScoreBody
from sie.frontend.dialects.openai.openapi import CachedDetails
from sie.frontend.dialects.operation import (
    BAD,
    EVENTS,
    FAILED,
    GENERATE_FAULTS,
    GENERATION,
    INFERENCE,
    JSON,
    LATE,
    NO_LOAD,
    NOT_FOUND,
    NOT_NOW,
    POISON,
    STALLED,
    TOO_LARGE,
    Answer,
    ErrorDetail,
    Operation,
    Reply,
    Usage,
)
from sie.values.extract import Classification, DetectedObject, ItemError, Relation


class DenseVector(Reply):
    dims: int
    dtype: str
    values: list[float]


class SparseVector(Reply):
    dims: int
    dtype: str
    indices: list[int]
    values: list[float]


class TokenVectors(Reply):
    token_dims: int
    num_tokens: int
    dtype: str
    values: list[list[float]]


class EncodeResult(Reply):
    id: str | UnsetType = UNSET
    dense: DenseVector | UnsetType = UNSET
    sparse: SparseVector | UnsetType = UNSET
    multivector: TokenVectors | UnsetType = UNSET
    truncated: Literal[True] | UnsetType = UNSET


class EncodeAnswer(Reply):
    model: str
    items: list[EncodeResult]
    timing: TimingBody
    usage: Usage


class ScoreResult(Reply):
    item_id: str
    score: float
    rank: int
    truncated: Literal[True] | UnsetType = UNSET


class ScoreAnswer(Reply):
    model: str
    query_id: str | None
    scores: list[ScoreResult]
    usage: Usage


class ExtractResult(Reply):
    id: str
    entities: list[EntityBody]
    relations: list[Relation]
    classifications: list[Classification]
    objects: list[DetectedObject]
    data: dict[str, Any]
    error: ItemError | UnsetType = UNSET
    truncated: Literal[True] | UnsetType = UNSET


class ExtractAnswer(Reply):
    model: str
    items: list[ExtractResult]
    usage: Usage


class GenerateTokens(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class GenerateAnswer(Reply):
    model: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: GenerateTokens
    ttft_ms: float
    tpot_ms: float | None


class NativeError(Struct, kw_only=True):
    detail: ErrorDetail


TAGS: Final = {INFERENCE: "Run a model. Bodies may be JSON or, on the SIE routes, msgpack."}
ERRORS: Final = {"sie": NativeError}
_FAULTS: Final = (BAD, NOT_FOUND, STALLED, TOO_LARGE, POISON, FAILED, NO_LOAD, NOT_NOW, LATE)
_BOTH: Final = (JSON, MSGPACK)
_NEGOTIATED: Final = (
    "The answer is msgpack unless `Accept` names `application/json` and no msgpack type; errors are always JSON. "
    "In msgpack, an array of numbers is a map as msgpack-numpy writes it."
)

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/encode/{model}",
        tag=INFERENCE,
        summary="Vectors of texts or images",
        description=_NEGOTIATED,
        request=EncodeBody,
        media=_BOTH,
        model="sentence-transformers/all-MiniLM-L6-v2",
        example={"items": [{"id": "a", "text": "A quick brown fox"}], "params": {"output_dtype": "float16"}},
        answers=(Answer(200, "A result for each item.", _BOTH, EncodeAnswer),),
        faults=_FAULTS,
        has_timing=True,
        may_cut=True,
    ),
    Operation(
        template="/v1/score/{model}",
        tag=INFERENCE,
        summary="Scores of items against a query",
        description=_NEGOTIATED,
        request=ScoreBody,
        media=_BOTH,
        model="BAAI/bge-reranker-v2-m3",
        example={"query": {"text": "what is a fox?"}, "items": [{"text": "A quick brown fox"}, {"text": "A stone"}]},
        answers=(Answer(200, "A score for each item, best first.", _BOTH, ScoreAnswer),),
        faults=_FAULTS,
        has_timing=True,
        may_cut=True,
    ),
    Operation(
        template="/v1/extract/{model}",
        tag=INFERENCE,
        summary="Entities, relations and classes of texts, objects in images",
        description=_NEGOTIATED,
        request=ExtractBody,
        media=_BOTH,
        model="dslim/bert-base-NER",
        example={"items": [{"text": "Ada met Charles in London"}], "params": {"labels": ["PER", "LOC"]}},
        answers=(Answer(200, "A result for each item.", _BOTH, ExtractAnswer),),
        faults=_FAULTS,
        has_timing=True,
        may_cut=True,
    ),
    Operation(
        template="/v1/generate/{model}",
        tag=GENERATION,
        summary="Text generation, in the SIE form",
        description="Write `__` for each slash of the model's id. The request does not wait for a model that is loading.",
        request=GenerateBody,
        model="org__model",
        example={"prompt": "A fox is", "max_new_tokens": 16},
        answers=(
            Answer(
                200,
                "The text. With `stream`, numbered chunks, then `data: [DONE]`.",
                (JSON, EVENTS),
                GenerateAnswer,
            ),
        ),
        faults=GENERATE_FAULTS,
    ),
)
