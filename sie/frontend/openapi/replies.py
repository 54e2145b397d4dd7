"""Owns the types of what this server answers, as JSON; they describe, and no request passes through them.

As msgpack, arrays of numbers are maps (`sie.frontend.dialects.native.arrays`) and texts in base64 are bytes. Tests hold live
answers against these types, so that none can say what the server does not.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.native.encode_reply import TimingBody
from sie.frontend.dialects.native.extract import EntityBody
from sie.values.extract import Classification, DetectedObject, ItemError, Relation


class _Reply(Struct, kw_only=True, forbid_unknown_fields=True):
    """No reply has a key that is not described."""


class DenseVector(_Reply):
    dims: int
    dtype: str
    values: list[float]


class SparseVector(_Reply):
    dims: int
    dtype: str
    indices: list[int]
    values: list[float]


class TokenVectors(_Reply):
    token_dims: int
    num_tokens: int
    dtype: str
    values: list[list[float]]


class EncodeResult(_Reply):
    id: str | UnsetType = UNSET
    dense: DenseVector | UnsetType = UNSET
    sparse: SparseVector | UnsetType = UNSET
    multivector: TokenVectors | UnsetType = UNSET


class Usage(_Reply):
    input_tokens: int
    images: int | UnsetType = UNSET


class EncodeAnswer(_Reply):
    model: str
    items: list[EncodeResult]
    timing: TimingBody
    usage: Usage


class ScoreResult(_Reply):
    item_id: str
    score: float
    rank: int


class ScoreAnswer(_Reply):
    model: str
    query_id: str | None
    scores: list[ScoreResult]
    usage: Usage


class ExtractResult(_Reply):
    id: str
    entities: list[EntityBody]
    relations: list[Relation]
    classifications: list[Classification]
    objects: list[DetectedObject]
    data: dict[str, Any]
    error: ItemError | UnsetType = UNSET


class ExtractAnswer(_Reply):
    model: str
    items: list[ExtractResult]
    usage: Usage


class RerankDocument(_Reply):
    text: str


class RerankResult(_Reply):
    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class RerankAnswer(_Reply):
    model: str
    results: list[RerankResult]
    usage: Usage


class Embedding(_Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(_Reply):
    prompt_tokens: int
    total_tokens: int
    sie_token_source: Literal["worker"]


class EmbeddingsAnswer(_Reply):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class Profile(_Reply):
    is_default: bool
    output_types: list[str]
    output_similarity: str
    identity: str | None
    remote_contract_sha256: str | None
    remote_execution_sha256: str | None
    runtime_instance_id: str | None


class LoadError(_Reply):
    code: str
    message: str
    attempts: int
    permanent: bool


class Routing(_Reply):
    policy: str | None
    upstream_kind: str | None


class Lora(_Reply):
    id: str
    state: str


class ModelInfo(_Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    name: str
    inputs: list[str]
    outputs: list[str]
    dims: dict[str, int]
    loaded: bool
    max_sequence_length: int | None
    profiles: dict[str, Profile]
    state: Literal["available", "loading", "loaded", "unloading", "failed"]
    last_error: LoadError | None
    revision: str | None
    capabilities: dict[str, Any] | None
    routing: Routing
    status: Literal["loaded", "unloaded", "reloading"] | UnsetType = UNSET
    root: str | UnsetType = UNSET
    tools_available: bool | UnsetType = UNSET
    encoder_weights: Literal["int8"] | UnsetType = UNSET
    loras: list[Lora] | UnsetType = UNSET


class ModelList(_Reply):
    object: Literal["list"]
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
    models: list[ModelInfo]


class ErrorDetail(Struct, kw_only=True):
    code: str
    message: str


class NativeError(Struct, kw_only=True):
    detail: ErrorDetail


class TensorError(Struct, kw_only=True):
    error: str


class OpenAIErrorObject(Struct, kw_only=True):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class OpenAIError(Struct, kw_only=True):
    error: OpenAIErrorObject
    message: str | UnsetType = UNSET
    detail: Any = UNSET


class ModelMissing(_Reply):
    detail: ErrorDetail
    error: OpenAIErrorObject


class ModelStatus(_Reply):
    model_id: str
    status: Literal["loaded", "unloaded", "loading", "unloading", "reloading", "failed", "not_found"]
    error: str | UnsetType = UNSET
    detail: ErrorDetail | UnsetType = UNSET


class WatchTicket(_Reply):
    ticket: str


class AdminAllowed(_Reply):
    allowed: Literal[True]
