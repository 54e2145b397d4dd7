"""Defines the types of a row of the OpenAPI document, and the parts that the rows of several APIs share.

The rows are in each package's `openapi.py`, and `sie.frontend.openapi` collects them. They only describe routes. No
request passes through them.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType

JSON: Final = "application/json"
BINARY: Final = "application/octet-stream"
TEXT: Final = "text/plain"
EVENTS: Final = "text/event-stream"
FORM: Final = "multipart/form-data"
ZIP: Final = "application/zip"
ANY: Final = "*/*"
"""A body whose media type its client chose; it has no schema."""

INFERENCE: Final = "Inference"
MODELS: Final = "Models"
GENERATION: Final = "Generation"
"""Tags of rows of several packages."""

_StructType = type[Struct]


class Answer(Struct, frozen=True):
    """One success status and the media types of its body. Without a media type, the body is empty.

    type is the same for all media types. None means text or any JSON object, or any JSON list if is_list is set.
    """

    status: int
    description: str
    media: tuple[str, ...] = (JSON,)
    type: _StructType | None = None
    is_list: bool = False


class Fault(Struct, frozen=True):
    """One error status and its possible codes, with the names of `sie.values.errors`."""

    status: int
    codes: tuple[str, ...]
    description: str
    type: _StructType | None = None
    """The body. None means the body that the route's envelope has for every error."""


class Operation(Struct, frozen=True, kw_only=True):
    """The document's description of one route."""

    template: str
    tag: str
    summary: str
    answers: tuple[Answer, ...]
    method: str = ""
    """The method, if the path has several routes. Empty means the first one."""
    description: str = ""
    request: _StructType | None = None
    media: tuple[str, ...] = (JSON,)
    """The media types of the request."""
    example: dict[str, Any] = {}
    model: str = ""
    """An example of the name in the path, usually a model's name."""
    second: str = ""
    """An example of the second name in the path."""
    faults: tuple[Fault, ...] = ()
    has_timing: bool = False
    """Whether a 200 has the timing headers."""
    may_cut: bool = False
    """Whether a 200 may have the header that lists the items with truncated texts."""


class Reply(Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of the types that describe an answer. An answer has no other keys than its type."""


class Usage(Reply):
    input_tokens: int
    images: int | UnsetType = UNSET


class ErrorDetail(Struct, kw_only=True):
    code: str
    message: str


BAD: Final = Fault(400, ("INVALID_INPUT", "INPUT_TOO_LONG"), "The request is wrong; the message names the field.")
FORBIDDEN: Final = Fault(
    403,
    ("FORBIDDEN",),
    "This client may not do this; the message names the setting or the API key's scope that decides.",
)
NOT_FOUND: Final = Fault(404, ("MODEL_NOT_FOUND",), "The model was not found; the message names similar ones.")
STALLED: Final = Fault(408, ("REQUEST_TIMEOUT",), "The body made no progress, or missed the deadline.")
TOO_LARGE: Final = Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_body_bytes`.")
POISON: Final = Fault(422, ("POISON_INPUT",), "This input was running each time a worker died.")
FAILED: Final = Fault(500, ("INFERENCE_ERROR",), "An internal error, or the model produced a value that is not finite.")
INTERNAL: Final = Fault(500, ("INFERENCE_ERROR",), "An internal error.")
NO_LOAD: Final = Fault(502, ("MODEL_LOAD_FAILED",), "The model's last load failed.")
NOT_NOW: Final = Fault(
    503,
    (
        "QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "LORA_LOADING", "RESOURCE_EXHAUSTED", "WORKER_LOST",
        "SHUTTING_DOWN",
    ),
    "The server cannot serve this now; `Retry-After` says when to retry.",
)  # fmt: skip
LATE: Final = Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the answer was ready.")

GENERATION_TOO_LARGE: Final = Fault(413, ("INPUT_TOO_LONG",), "The body is over `max_generation_body_bytes`.")
GENERATION_FAILURES: Final = (
    INTERNAL,
    NO_LOAD,
    Fault(503, ("QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "RESOURCE_EXHAUSTED", "WORKER_LOST", "SHUTTING_DOWN"),
          "The server cannot serve this now; `Retry-After` says when to retry."),
    Fault(504, ("DEADLINE_EXCEEDED",), "The deadline passed before the first token was ready."),
)  # fmt: skip
"""The faults of a route that generates text, after its request was read."""
GENERATE_FAULTS: Final = (
    Fault(
        400, ("INVALID_INPUT", "INPUT_TOO_LONG", "CONTEXT_LENGTH_EXCEEDED"), "The request is wrong; the message names the field."
    ),
    Fault(404, ("MODEL_NOT_FOUND",), "The model was not found."),
    STALLED,
    GENERATION_TOO_LARGE,
    POISON,
    *GENERATION_FAILURES,
)  # fmt: skip
"""The faults of text generation routes whose path names the model."""
