"""The types of a row of the OpenAPI document, and the parts that the rows of several APIs share.

The rows themselves are in each package's `openapi.py`; `sie.frontend.openapi` collects them. They describe: no request
passes through them.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
TEXT: Final = "text/plain"
EVENTS: Final = "text/event-stream"

INFERENCE: Final = "Inference"
MODELS: Final = "Models"
GENERATION: Final = "Generation"
"""Tags that the rows of several packages have."""

_StructType = type[Struct]


class Answer(Struct, frozen=True):
    """One status without an error, and the media types of its body; a body without a media type is empty.

    type is the same for all media types. None: text, or any JSON object, or with is_list any JSON list.
    """

    status: int
    description: str
    media: tuple[str, ...] = (JSON,)
    type: _StructType | None = None
    is_list: bool = False


class Fault(Struct, frozen=True):
    """One status of an error, and the codes that it may have, as `sie.values.errors` names them."""

    status: int
    codes: tuple[str, ...]
    description: str
    type: _StructType | None = None
    """The body. None: the one that the route's envelope has for every error."""


class Operation(Struct, frozen=True, kw_only=True):
    """One row: how the document describes one route."""

    template: str
    tag: str
    summary: str
    answers: tuple[Answer, ...]
    method: str = ""
    """The method, where the path has several routes. Empty: the first of them."""
    description: str = ""
    request: _StructType | None = None
    media: tuple[str, ...] = (JSON,)
    """The media types of the request."""
    example: dict[str, Any] = {}
    model: str = ""
    """An example of the name in the path, mostly a model's."""
    faults: tuple[Fault, ...] = ()
    has_timing: bool = False
    """Whether a 200 has the headers that say where the time went."""
    may_cut: bool = False
    """Whether a 200 may have the header that names the items whose texts were cut."""


class Reply(Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of the types that describe an answer: no answer has a key that is not described."""


class Usage(Reply):
    input_tokens: int
    images: int | UnsetType = UNSET


class ErrorDetail(Struct, kw_only=True):
    code: str
    message: str


BAD: Final = Fault(400, ("INVALID_INPUT", "INPUT_TOO_LONG"), "The request is wrong; the message names the field.")
FORBIDDEN: Final = Fault(
    403, ("FORBIDDEN",), "Not for this client; the message names the setting or the API key's scope that decides."
)
NOT_FOUND: Final = Fault(404, ("MODEL_NOT_FOUND",), "No such model; the message names near ones.")
STALLED: Final = Fault(408, ("REQUEST_TIMEOUT",), "The body made no progress, or missed the deadline.")
TOO_LARGE: Final = Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_body_bytes`.")
POISON: Final = Fault(422, ("POISON_INPUT",), "This input was running each time a worker died.")
FAILED: Final = Fault(
    500, ("INFERENCE_ERROR",), "Something of the server's failed, or the model gave a value that is not finite."
)
INTERNAL: Final = Fault(500, ("INFERENCE_ERROR",), "Something of the server's failed.")
NO_LOAD: Final = Fault(502, ("MODEL_LOAD_FAILED",), "The model's last load failed.")
NOT_NOW: Final = Fault(
    503,
    (
        "QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "LORA_LOADING", "RESOURCE_EXHAUSTED", "WORKER_LOST",
        "SHUTTING_DOWN",
    ),
    "Not now; `Retry-After` says when to ask again.",
)  # fmt: skip
LATE: Final = Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the answer was there.")

GENERATION_TOO_LARGE: Final = Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_generation_body_bytes`.")
GENERATION_FAILURES: Final = (
    INTERNAL,
    NO_LOAD,
    Fault(503, ("QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "RESOURCE_EXHAUSTED", "WORKER_LOST", "SHUTTING_DOWN"),
          "Not now; `Retry-After` says when to ask again."),
    Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the first token was there."),
)  # fmt: skip
"""How a route that generates text can fail after its request was read."""
GENERATE_FAULTS: Final = (
    Fault(
        400, ("INVALID_INPUT", "INPUT_TOO_LONG", "CONTEXT_LENGTH_EXCEEDED"), "The request is wrong; the message names the field."
    ),
    Fault(404, ("MODEL_NOT_FOUND",), "No such model."),
    STALLED,
    GENERATION_TOO_LARGE,
    POISON,
    *GENERATION_FAILURES,
)  # fmt: skip
"""The faults of the generating routes whose path names the model."""
