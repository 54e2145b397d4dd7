"""Defines the OpenAPI rows of Anthropic's Messages API, and the types of its answers and errors.

Source: generation API reference, section 6.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.anthropic.request import MessagesBody
from sie.frontend.dialects.operation import EVENTS, JSON, Answer, Fault, Operation, Reply


class MessageUsage(Reply):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    session_id: str | UnsetType = UNSET
    agentic_tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    files: list[dict[str, Any]] | UnsetType = UNSET


class TokenCount(Reply):
    input_tokens: int


class MessageErrorObject(Struct, kw_only=True):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessageError(Struct, kw_only=True):
    type: Literal["error"]
    error: MessageErrorObject


_TAG: Final = "Messages"
TAGS: Final = {_TAG: "Text from models that generate, in Anthropic's form; docs/generation.md has the details."}
_FAULTS: Final = (
    Fault(400, ("invalid_request_error",), "The request is wrong in any way; the message names the field."),
    Fault(
        404,
        ("not_found_error",),
        "The model was not found, or none was named and there is no default; the message lists the generation models.",
    ),
    Fault(408, ("invalid_request_error",), "The body made no progress, or missed the deadline."),
    Fault(413, ("request_too_large",), "The body is over `max_generation_body_bytes`."),
    Fault(500, ("api_error",), "An internal error."),
    Fault(502, ("api_error",), "The model's last load failed."),
    Fault(503, ("api_error",), "The server cannot serve this now; `Retry-After` says when to retry."),
    Fault(504, ("timeout_error",), "The deadline passed before the first token was ready."),
    Fault(529, ("overloaded_error",), "The queue is full; `Retry-After` says when to retry."),
)
_EXAMPLE: Final = {"messages": [{"role": "user", "content": "What is a fox?"}], "max_tokens": 64}

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/messages",
        tag=_TAG,
        summary="The next message of a conversation, in Anthropic's form",
        description="The request waits for a model that is loading.",
        request=MessagesBody,
        example=_EXAMPLE,
        answers=(Answer(200, "The message. With `stream`, named events.", (JSON, EVENTS), MessageAnswer),),
        faults=_FAULTS,
    ),
    Operation(
        template="/v1/messages/count_tokens",
        tag=_TAG,
        summary="The number of tokens in a conversation",
        description="Takes the body of `/v1/messages`, and returns the `input_tokens` that its answer would have.",
        request=MessagesBody,
        example=_EXAMPLE,
        answers=(Answer(200, "The number.", (JSON,), TokenCount),),
        faults=_FAULTS,
    ),
)
