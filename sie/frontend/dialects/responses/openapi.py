"""Defines the OpenAPI rows of `/v1/responses`, and the types of its answers. Source: generation API reference, section 5."""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import UNSET, UnsetType

from sie.frontend.dialects.openai.openapi import TEXT_FAULTS
from sie.frontend.dialects.operation import EVENTS, JSON, Answer, Fault, Operation, Reply
from sie.frontend.dialects.responses.request import ResponsesBody


class ReadTokens(Reply):
    cached_tokens: int
    cache_write_tokens: int


class WrittenTokens(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: ReadTokens
    output_tokens: int
    output_tokens_details: WrittenTokens
    total_tokens: int


class ResponseFault(Reply):
    code: str
    message: str


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    instructions: str | None
    previous_response_id: str | None
    background: bool
    store: bool
    metadata: dict[str, str]
    max_output_tokens: int | None
    max_tool_calls: None
    temperature: float | None
    top_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    text: dict[str, Any]
    truncation: Literal["auto", "disabled"]
    user: str | None
    output_text: str | UnsetType = UNSET


class ResponseDeleted(Reply):
    id: str
    object: Literal["response.deleted"]
    deleted: bool


class InputTokens(Reply):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItemList(Reply):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


_TAG: Final = "Responses"
TAGS: Final = {
    _TAG: "Text from models that generate, as responses that are stored; docs/generation.md has the details."
}
_ONE: Final = "/v1/responses/{response_id}"
_EXAMPLE_ID: Final = "resp_9f4cc2e96470f063b671c1b0667e40f7"
_BAD_QUERY: Final = Fault(400, ("INVALID_INPUT",), "A value in the query is not supported; `param` names the field.")
_MAKING_FAULTS: Final = (
    *(fault for fault in TEXT_FAULTS if fault.status != 404),
    Fault(404, ("MODEL_NOT_FOUND", "PREVIOUS_RESPONSE_NOT_FOUND"), "The model or the previous response was not found."),
)
_UNKNOWN: Final = Fault(404, ("RESPONSE_NOT_FOUND",), "The response was not found, or belongs to another API key.")
_NO_STORE: Final = Fault(503, ("RESPONSES_UNAVAILABLE",), "Responses cannot be read now.")

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/responses",
        tag=_TAG,
        summary="Make a response",
        description="The request waits for a model that is loading. With `background`, it returns at once, and the client "
        "asks for the result later.",
        request=ResponsesBody,
        example={"input": "What is a fox?", "max_output_tokens": 64},
        answers=(Answer(200, "The response. With `stream`, numbered events.", (JSON, EVENTS), ResponseAnswer),),
        faults=_MAKING_FAULTS,
    ),
    Operation(
        template="/v1/responses/input_tokens",
        tag=_TAG,
        summary="The number of tokens in a prompt",
        description="Takes the body of `POST /v1/responses`, but makes no response.",
        request=ResponsesBody,
        example={"input": "What is a fox?"},
        answers=(Answer(200, "The number.", (JSON,), InputTokens),),
        faults=_MAKING_FAULTS,
    ),
    Operation(
        template=_ONE,
        tag=_TAG,
        summary="The current state of a response, or its stream",
        description="In the query: `stream` (`true` for events), `starting_after` (the number of the event before the first "
        "one to send).",
        model=_EXAMPLE_ID,
        answers=(
            Answer(
                200,
                "The response. With `stream`, its events with their original numbers.",
                (JSON, EVENTS),
                ResponseAnswer,
            ),
        ),
        faults=(
            _BAD_QUERY,
            Fault(
                404,
                ("RESPONSE_NOT_FOUND", "STREAM_NOT_KEPT"),
                "The response was not found, belongs to another API key, or had too many events to store.",
            ),
            _NO_STORE,
        ),
    ),
    Operation(
        template=_ONE,
        method="DELETE",
        tag=_TAG,
        summary="Delete a response",
        description="A response that is being made is stopped.",
        model=_EXAMPLE_ID,
        answers=(Answer(200, "The response is deleted.", (JSON,), ResponseDeleted),),
        faults=(_UNKNOWN, _NO_STORE),
    ),
    Operation(
        template=f"{_ONE}/cancel",
        tag=_TAG,
        summary="Stop a response that is being made",
        model=_EXAMPLE_ID,
        answers=(Answer(200, "The response, cancelled by this request or before.", (JSON,), ResponseAnswer),),
        faults=(
            Fault(
                404, ("RESPONSE_NOT_FOUND", "RESPONSE_ENDED"), "The response was not found, or it has already ended."
            ),
            _NO_STORE,
        ),
    ),
    Operation(
        template=f"{_ONE}/input_items",
        tag=_TAG,
        summary="The input items of a response",
        description="In the query: `limit` (1 to 100, 20 if not given), `order` (`desc` or `asc`), `after` (an item's id).",
        model=_EXAMPLE_ID,
        answers=(Answer(200, "One page of the items.", (JSON,), InputItemList),),
        faults=(_BAD_QUERY, _UNKNOWN, _NO_STORE),
    ),
)
