"""Defines the OpenAPI rows of the server's own routes: management of models, health, metrics and the document."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import UNSET, UnsetType

from sie.frontend.dialects.operation import (
    FAILED,
    FORBIDDEN,
    JSON,
    LATE,
    MODELS,
    STALLED,
    TEXT,
    TOO_LARGE,
    Answer,
    ErrorDetail,
    Fault,
    Operation,
    Reply,
)
from sie.frontend.models.admin import ModelBody


class ModelStatus(Reply):
    model_id: str
    status: Literal["loaded", "unloaded", "loading", "unloading", "reloading", "failed", "not_found"]
    error: str | UnsetType = UNSET
    detail: ErrorDetail | UnsetType = UNSET


class WatchTicket(Reply):
    ticket: str


class AdminAllowed(Reply):
    allowed: Literal[True]


_HTML: Final = "text/html"
_TAG: Final = "Operation"
TAGS: Final = {
    MODELS: "The served models, and for administrators the models in memory.",
    _TAG: "Health, metrics and this document.",
}
ACCESS: Final = (
    Fault(401, ("UNAUTHORIZED",), "The server asks for an API key, and the request has no valid one."),
    FORBIDDEN,
    Fault(429, ("RATE_LIMIT",), "A limit of the API key is reached; `Retry-After` says when to retry."),
)
"""The faults of every route that asks for a key, if the server has keys."""
_ADMIN: Final = (
    Fault(400, ("INVALID_INPUT",), 'The body is not `{"model_id": text}`.'),
    FORBIDDEN,
    Fault(404, ("MODEL_NOT_FOUND",), "The model was not found.", ModelStatus),
    STALLED,
    TOO_LARGE,
    FAILED,
    Fault(502, ("MODEL_LOAD_FAILED",), "The model could not be loaded.", ModelStatus),
    LATE,
)


def _admin(verb: str, summary: str, description: str) -> Operation:
    moving = Answer(202, "The deadline passed first; the operation continues.", type=ModelStatus)
    return Operation(
        template=f"/v1/models/{verb}",
        tag=MODELS,
        summary=summary,
        description=description,
        request=ModelBody,
        example={"model_id": "org/model"},
        answers=(
            Answer(200, "The present status of the model.", type=ModelStatus),
            *(() if verb == "status" else (moving,)),
        ),
        faults=_ADMIN,
    )


def _text(template: str, summary: str, *answers: Answer) -> Operation:
    return Operation(template=template, tag=_TAG, summary=summary, answers=answers)


_OK: Final = Answer(200, "It is.", (TEXT,))
_DOCUMENT: Final = Answer(200, "An OpenAPI document, version 3.1.")

OPERATIONS: Final[tuple[Operation, ...]] = (
    _admin("load", "Load a model", "Answers when it is loaded. `admin_from` says which clients may do this."),
    _admin(
        "unload",
        "Unload a model",
        "Its queued requests are answered first. `admin_from` says which clients may do this.",
    ),
    _admin("reload", "Reload a model", "Its files are read again. `admin_from` says which clients may do this."),
    _admin("status", "The status of a model", "`admin_from` says which clients may do this."),
    Operation(
        template="/v1/admin",
        tag=MODELS,
        summary="Whether this client may manage models",
        answers=(Answer(200, "It may.", type=AdminAllowed),),
        faults=(FORBIDDEN,),
    ),
    Operation(
        template="/v1/watch-ticket",
        tag=_TAG,
        summary="A ticket for the live feed",
        description="Opens `/ws/status?ticket=...` for half a minute. It is for browsers, which cannot set a header there.",
        answers=(Answer(200, "The ticket; empty if the server asks for no API key.", type=WatchTicket),),
    ),
    _text("/healthz", "Whether the process is alive", _OK),
    _text(
        "/readyz",
        "Whether requests can be served",
        Answer(200, "`ok`: every model named at the start is loaded.", (TEXT,)),
        Answer(
            503,
            "`not ready: ` and the reason: the models that are not loaded, or that the server is starting or stopping.",
            (TEXT,),
        ),
    ),
    _text(
        "/health",
        "Whether the process is alive, and its kind",
        Answer(200, "`OK`. If `Accept` has JSON, an object whose `type` is `worker`: not a gateway.", (TEXT, JSON)),
    ),
    _text("/metrics", "Counters for Prometheus", Answer(200, "Its text format, version 0.0.4.", (TEXT,))),
    _text("/", "A dashboard for browsers", Answer(200, "The page if `Accept` has HTML, else `OK`.", (_HTML, TEXT))),
    _text("/docs", "This document as a page", Answer(200, "A page that loads nothing from other servers.", (_HTML,))),
    _text("/openapi.json", "This document", _DOCUMENT),
    _text("/api-doc/openapi.json", "This document, at the path of other servers", _DOCUMENT),
)
