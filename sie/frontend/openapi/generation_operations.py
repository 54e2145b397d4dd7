"""Owns the rows of the routes that generate text. Source: generation API reference, sections 2 to 4."""

from __future__ import annotations

from typing import Final

from sie.frontend.dialects.native.negotiate import JSON
from sie.frontend.dialects.openai.chat import ChatBody
from sie.frontend.dialects.openai.completions import CompletionsBody
from sie.frontend.openapi.generation_replies import ChatAnswer, CompletionsAnswer
from sie.frontend.openapi.rows import Answer, Fault, Operation

EVENTS: Final = "text/event-stream"
_TAG: Final = "Generation"
TAGS: Final = {_TAG: "Text from models that generate, in OpenAI's forms; docs/generation.md has the details."}
FAULTS: Final = (
    Fault(400, ("INVALID_INPUT", "INVALID_JSON", "INPUT_TOO_LONG", "CONTEXT_LENGTH_EXCEEDED", "TOOL_CHOICE_INVALID"),
          "The request is wrong; `param` names the field."),
    Fault(404, ("MODEL_NOT_FOUND",), "No such model, or none named and no default; the message names those that generate."),
    Fault(408, ("REQUEST_TIMEOUT",), "The body made no progress, or missed the deadline."),
    Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_generation_body_bytes`."),
    Fault(415, ("INVALID_INPUT",), "`Content-Type` is not JSON."),
    Fault(422, ("INVALID_INPUT", "POISON_INPUT"), "A field has the wrong type; or the input was running when workers died."),
    Fault(500, ("INFERENCE_ERROR",), "Something of the server's failed."),
    Fault(502, ("MODEL_LOAD_FAILED",), "The model's last load failed."),
    Fault(503, ("QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "RESOURCE_EXHAUSTED", "WORKER_LOST", "SHUTTING_DOWN"),
          "Not now; `Retry-After` says when to ask again."),
    Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the first token was there."),
)  # fmt: skip
_STREAMED: Final = "With `stream`, events of chunks, `data: [DONE]` the last."

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/chat/completions",
        tag=_TAG,
        summary="The next message of a conversation",
        description="A model that loads is waited for.",
        request=ChatBody,
        example={"messages": [{"role": "user", "content": "What is a fox?"}], "max_tokens": 64},
        answers=(Answer(200, f"The whole answer. {_STREAMED}", (JSON, EVENTS), ChatAnswer),),
        faults=FAULTS,
    ),
    Operation(
        template="/v1/completions",
        tag=_TAG,
        summary="What follows a text",
        description="No chat template: the prompt is read as it is. A model that loads is waited for.",
        request=CompletionsBody,
        example={"prompt": "A fox is", "max_tokens": 16},
        answers=(Answer(200, f"The whole answer. {_STREAMED}", (JSON, EVENTS), CompletionsAnswer),),
        faults=FAULTS,
    ),
)
