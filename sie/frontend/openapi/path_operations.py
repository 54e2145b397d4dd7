"""Owns the rows of the generating routes whose path names the model, and the types of what they answer.

Source: SIE API reference, section 10; KServe v2 sheet, section 11.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import UNSET, Struct, UnsetType

from sie.frontend.dialects.kserve.generate import TextInputBody
from sie.frontend.dialects.native.generate import GenerateBody
from sie.frontend.dialects.native.negotiate import JSON
from sie.frontend.openapi.generation_operations import EVENTS
from sie.frontend.openapi.generation_replies import CachedDetails
from sie.frontend.openapi.rows import Answer, Fault, Operation


class GenerateTokens(Struct, kw_only=True, forbid_unknown_fields=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedDetails


class GenerateAnswer(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    text: str
    finish_reason: Literal["stop", "length"]
    usage: GenerateTokens
    ttft_ms: float
    tpot_ms: float | None


class TextOutput(Struct, kw_only=True, forbid_unknown_fields=True):
    id: str | UnsetType = UNSET
    model_name: str
    model_version: str
    text_output: str


_FAULTS: Final = (
    Fault(
        400, ("INVALID_INPUT", "INPUT_TOO_LONG", "CONTEXT_LENGTH_EXCEEDED"), "The request is wrong; the message names the field."
    ),
    Fault(404, ("MODEL_NOT_FOUND",), "No such model."),
    Fault(408, ("REQUEST_TIMEOUT",), "The body made no progress, or missed the deadline."),
    Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_generation_body_bytes`."),
    Fault(422, ("POISON_INPUT",), "This input was running each time a worker died."),
    Fault(500, ("INFERENCE_ERROR",), "Something of the server's failed."),
    Fault(502, ("MODEL_LOAD_FAILED",), "The model's last load failed."),
    Fault(503, ("QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "RESOURCE_EXHAUSTED", "WORKER_LOST", "SHUTTING_DOWN"),
          "Not now; `Retry-After` says when to ask again."),
    Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the first token was there."),
)  # fmt: skip
_TENSOR_EXAMPLE: Final = {"text_input": "A fox is", "parameters": {"max_tokens": 16}}

OPERATIONS: Final[tuple[Operation, ...]] = (
    Operation(
        template="/v1/generate/{model}",
        tag="Generation",
        summary="What follows a text, in the SIE form",
        description="Slashes of the model's id are written `__`. A model that loads is not waited for.",
        request=GenerateBody,
        model="org__model",
        example={"prompt": "A fox is", "max_new_tokens": 16},
        answers=(
            Answer(
                200,
                "The text. With `stream`, numbered chunks, `data: [DONE]` the last.",
                (JSON, EVENTS),
                GenerateAnswer,
            ),
        ),
        faults=_FAULTS,
    ),
    Operation(
        template="/v2/models/{model}/generate",
        tag="KServe v2",
        summary="What follows a text, as in Triton",
        description="A model that loads is not waited for. Of a model that does not generate text, members called as its inputs "
        "are these, and its outputs are members of the answer.",
        request=TextInputBody,
        model="org/model",
        example=_TENSOR_EXAMPLE,
        answers=(Answer(200, "The text.", (JSON,), TextOutput),),
        faults=_FAULTS,
    ),
    Operation(
        template="/v2/models/{model}/generate_stream",
        tag="KServe v2",
        summary="The same in pieces",
        description="Each event is what `/generate` answers, with a piece of the text; one has all of it where `stream` is false.",
        request=TextInputBody,
        model="org/model",
        example=_TENSOR_EXAMPLE,
        answers=(Answer(200, "Events. An error behind the first is one, too.", (EVENTS,)),),
        faults=_FAULTS,
    ),
)
