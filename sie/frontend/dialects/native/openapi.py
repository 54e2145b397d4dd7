"""Defines the OpenAPI rows of the native SIE API, and the types of its answers and errors.

The types describe JSON. In msgpack, arrays of numbers are maps (`sie.frontend.dialects.native.arrays`) and base64
texts are bytes. Tests check live answers against these types. Source of `/v1/generate`: SIE API reference, section 10.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType, defstruct

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
from sie.values.output_kinds import KINDS, OutputArray, OutputKind


def _vector_type(kind: OutputKind) -> Any:
    """Return the struct of an output in an item."""
    facts = [(fact.field, str if fact.tells == "dtype" else int) for fact in kind.facts]
    return defstruct(kind.wire_type, [*facts, *((form.field, _numbers(form)) for form in kind.arrays)], bases=(Reply,))


def _numbers(form: OutputArray) -> Any:
    if form.dtype:
        return list[int]
    return list[list[float]] if form.has_rows else list[float]


_RESULT_FIELDS: list[Any] = [
    ("id", str | UnsetType, UNSET),
    *((kind.name, _vector_type(kind) | UnsetType, UNSET) for kind in KINDS.values()),
    ("truncated", Literal[True] | UnsetType, UNSET),
]
EncodeResult: Any = defstruct("EncodeResult", _RESULT_FIELDS, bases=(Reply,))
"""An item: its id, a map for each of its outputs, and whether its text was truncated."""


class EncodeAnswer(Reply):
    model: str
    items: list[EncodeResult]  # type: ignore[valid-type]
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
