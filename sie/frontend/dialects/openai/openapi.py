"""Defines the OpenAPI rows of embeddings, models, chat and completions, and the types of their answers and errors.

Tests check live answers against these types. Source of the generation routes: generation API reference, sections 2 to 4.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.openai.approvals import ApprovalDecision
from sie.frontend.dialects.openai.chat import ChatBody
from sie.frontend.dialects.openai.completions import CompletionsBody
from sie.frontend.dialects.openai.embeddings import EmbeddingsBody
from sie.frontend.dialects.operation import (
    BAD,
    EVENTS,
    FAILED,
    GENERATION,
    GENERATION_FAILURES,
    GENERATION_TOO_LARGE,
    INFERENCE,
    JSON,
    LATE,
    MODELS,
    NO_LOAD,
    NOT_FOUND,
    NOT_NOW,
    STALLED,
    TOO_LARGE,
    Answer,
    ErrorDetail,
    Fault,
    Operation,
    Reply,
)
from sie.values.fallbacks import FallbackName


class ApprovalStatus(Reply):
    status: Literal["resolved", "queued", "not_found"]


class Embedding(Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Reply):
    prompt_tokens: int
    total_tokens: int
    sie_token_source: Literal["worker"]
    sie_truncated: list[int] | UnsetType = UNSET


class EmbeddingsAnswer(Reply):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class Profile(Reply):
    is_default: bool
    output_types: list[str]
    output_similarity: dict[str, str]
    identity: str | None
    remote_contract_sha256: str | None
    remote_execution_sha256: str | None
    runtime_instance_id: str | None


class LoadError(Reply):
    code: str
    message: str
    attempts: int
    permanent: bool


class ModelProgress(Reply):
    stage: str
    fraction: float | None
    worker: str


class Routing(Reply):
    policy: str | None
    upstream_kind: str | None


class Lora(Reply):
    id: str
    state: str


class ModelFallback(Reply):
    name: FallbackName
    reason: str


class ModelInfo(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
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
    status: Literal["loaded", "unloaded", "reloading"]
    root: str
    tools_available: bool | UnsetType = UNSET
    unserved_settings: list[str] | UnsetType = UNSET
    encoder_weights: Literal["int8"] | UnsetType = UNSET
    accept_token_ids: Literal[True] | UnsetType = UNSET
    loras: list[Lora] | UnsetType = UNSET
    progress: ModelProgress | UnsetType = UNSET
    fallbacks: list[ModelFallback] | UnsetType = UNSET


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None
    models: list[ModelInfo]


class CachedDetails(Reply):
    cached_tokens: int


class ReasoningDetails(Reply):
    reasoning_tokens: int


class TextUsage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails
    completion_tokens_details: ReasoningDetails
    avg_tok_per_sec: float
    avg_prompt_tok_per_sec: float
    avg_compl_tok_per_sec: float
    total_time_sec: float
    total_prompt_time_sec: float
    total_completion_time_sec: float


class LikelyToken(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(Reply):
    content: list[ChosenToken]
    refusal: None


class CalledFunction(Reply):
    name: str
    arguments: str


class CallAnswer(Reply):
    index: int
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswerMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallAnswer] | None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Reply):
    index: int
    message: ChatAnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class ChatAnswer(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: TextUsage
    session_id: str | UnsetType = UNSET
    agentic_tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    files: list[dict[str, Any]] | UnsetType = UNSET


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionsChoice(Reply):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None


class CompletionsAnswer(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionsChoice]
    usage: TextUsage


class OpenAIErrorObject(Struct, kw_only=True):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class OpenAIError(Struct, kw_only=True):
    error: OpenAIErrorObject
    message: str | UnsetType = UNSET
    detail: Any = UNSET


class ModelMissing(Reply):
    detail: ErrorDetail
    error: OpenAIErrorObject


class TextErrorObject(Struct, kw_only=True):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "permission_error", "server_error"]
    param: str | None
    code: str | None


class TextError(Struct, kw_only=True):
    error: TextErrorObject
    message: str


TAGS: Final = {GENERATION: "Text from models that generate, in OpenAI's forms; docs/generation.md has the details."}
EMBEDDINGS_FAULTS: Final = (
    BAD,
    Fault(404, ("MODEL_NOT_FOUND",), "The model was not found, or none was named and there is no default."),
    STALLED,
    TOO_LARGE,
    Fault(
        422,
        ("INVALID_INPUT", "POISON_INPUT"),
        "The body breaks the schema, or the input was running when workers died.",
    ),
    FAILED,
    NO_LOAD,
    NOT_NOW,
    LATE,
)
"""The faults of the routes with the error envelope of `/v1/embeddings`."""
TEXT_FAULTS: Final = (
    Fault(400, ("INVALID_INPUT", "INVALID_JSON", "INPUT_TOO_LONG", "CONTEXT_LENGTH_EXCEEDED", "TOOL_CHOICE_INVALID"),
          "The request is wrong; `param` names the field."),
    Fault(404, ("MODEL_NOT_FOUND",), "The model was not found, or none was named and there is no default; the message lists the generation models."),
    STALLED,
    GENERATION_TOO_LARGE,
    Fault(415, ("INVALID_INPUT",), "`Content-Type` is not JSON."),
    Fault(422, ("INVALID_INPUT", "POISON_INPUT"), "A field has the wrong type, or the input was running when workers died."),
    *GENERATION_FAILURES,
)  # fmt: skip
"""The faults of the routes that generate text."""
_STREAMED: Final = "With `stream`, events with chunks, then `data: [DONE]`."

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/embeddings",
        tag=INFERENCE,
        summary="Embeddings, in OpenAI's form",
        description="Dense float32 vectors. The request waits for a model that is loading.",
        request=EmbeddingsBody,
        example={"model": "sentence-transformers/all-MiniLM-L6-v2", "input": ["A quick brown fox", "jumps over"]},
        answers=(Answer(200, "An embedding for each input.", type=EmbeddingsAnswer),),
        faults=EMBEDDINGS_FAULTS,
        may_cut=True,
    ),
    Operation(
        template="/v1/models",
        tag=MODELS,
        summary="Every model, with its state",
        answers=(Answer(200, "All models.", type=ModelList),),
    ),
    Operation(
        template="/v1/models/{model}",
        tag=MODELS,
        summary="One model",
        model="sentence-transformers/all-MiniLM-L6-v2",
        answers=(Answer(200, "The model.", type=ModelInfo),),
        faults=(msgspec.structs.replace(NOT_FOUND, type=ModelMissing),),
    ),
    Operation(
        template="/v1/chat/completions",
        tag=GENERATION,
        summary="The next message of a conversation",
        description="The request waits for a model that is loading.",
        request=ChatBody,
        example={"messages": [{"role": "user", "content": "What is a fox?"}], "max_tokens": 64},
        answers=(Answer(200, f"The whole answer. {_STREAMED}", (JSON, EVENTS), ChatAnswer),),
        faults=TEXT_FAULTS,
    ),
    Operation(
        template="/v1/agent/approvals/{approval_id}",
        tag=GENERATION,
        summary="A decision on a call of a tool",
        description="The id is in an event of the stream that waits for it. Any frontend takes the decision, with the same API key.",
        model="appr_0123456789abcdef0123456789abcdef",
        request=ApprovalDecision,
        example={"decision": "approve"},
        answers=(
            Answer(200, "The decision counts; `queued` if the call did not wait for it yet.", type=ApprovalStatus),
            Answer(404, "There is no such approval, or it was decided or timed out.", type=ApprovalStatus),
        ),
        faults=(
            Fault(400, ("invalid_json",), "The request is wrong."),
            Fault(422, ("invalid_input",), "A field has another type; the message names it."),
        ),
    ),
    Operation(
        template="/v1/completions",
        tag=GENERATION,
        summary="The text that follows a prompt",
        description="The prompt is used as it is, without a chat template. The request waits for a model that is loading.",
        request=CompletionsBody,
        example={"prompt": "A fox is", "max_tokens": 16},
        answers=(Answer(200, f"The whole answer. {_STREAMED}", (JSON, EVENTS), CompletionsAnswer),),
        faults=TEXT_FAULTS,
    ),
)
