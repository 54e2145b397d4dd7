"""The OpenAPI rows of the routes that belong to no API: management of models, health, metrics and the document."""

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
    MODELS: "What is served, and for administrators: what is in memory.",
    _TAG: "Health, metrics and this document.",
}
ACCESS: Final = (
    Fault(401, ("UNAUTHORIZED",), "The server asks for an API key, and none that it knows came."),
    FORBIDDEN,
    Fault(429, ("RATE_LIMIT",), "A limit of the API key is reached; `Retry-After` says when to ask again."),
)
"""How every route can fail that asks for a key where there are keys."""
_ADMIN: Final = (
    Fault(400, ("INVALID_INPUT",), 'The body is not `{"model_id": text}`.'),
    FORBIDDEN,
    Fault(404, ("MODEL_NOT_FOUND",), "No such model.", ModelStatus),
    STALLED,
    TOO_LARGE,
    FAILED,
    Fault(502, ("MODEL_LOAD_FAILED",), "It could not be loaded.", ModelStatus),
    LATE,
)


def _admin(verb: str, summary: str, description: str) -> Operation:
    moving = Answer(202, "The deadline came first; it goes on.", type=ModelStatus)
    return Operation(
        template=f"/v1/models/{verb}",
        tag=MODELS,
        summary=summary,
        description=description,
        request=ModelBody,
        example={"model_id": "org/model"},
        answers=(
            Answer(200, "How the model is now.", type=ModelStatus),
            *(() if verb == "status" else (moving,)),
        ),
        faults=_ADMIN,
    )


def _text(template: str, summary: str, *answers: Answer) -> Operation:
    return Operation(template=template, tag=_TAG, summary=summary, answers=answers)


_OK: Final = Answer(200, "It lives.", (TEXT,))
_DOCUMENT: Final = Answer(200, "An OpenAPI document, version 3.1.")

OPERATIONS: Final[tuple[Operation, ...]] = (
    _admin("load", "Load a model", "Answers when it is loaded. `admin_from` says who may."),
    _admin("unload", "Unload a model", "What is queued for it is answered first. `admin_from` says who may."),
    _admin("reload", "Load a model anew", "Its files are read again. `admin_from` says who may."),
    _admin("status", "How a model is", "`admin_from` says who may ask."),
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
        description="Opens `/ws/status?ticket=...` for half a minute: in a browser, which can set no header there.",
        answers=(Answer(200, "The ticket; empty where no API key is asked for.", type=WatchTicket),),
    ),
    _text("/healthz", "Whether the process lives", _OK),
    _text(
        "/readyz",
        "Whether requests can be served",
        Answer(200, "`ok`: every model named at the start is loaded.", (TEXT,)),
        Answer(503, "`not ready: ` and why: which models are not loaded, or that it starts or stops.", (TEXT,)),
    ),
    _text(
        "/health",
        "Whether the process lives, and what it is",
        Answer(200, "`OK`, or where `Accept` has JSON `type`: `worker`, as this is no gateway.", (TEXT, JSON)),
    ),
    _text("/metrics", "Counters for Prometheus", Answer(200, "Its text format, version 0.0.4.", (TEXT,))),
    _text("/", "A dashboard for browsers", Answer(200, "The page if `Accept` has it, else `OK`.", (_HTML, TEXT))),
    _text("/docs", "This document as a page", Answer(200, "A page that fetches nothing from elsewhere.", (_HTML,))),
    _text("/openapi.json", "This document", _DOCUMENT),
    _text("/api-doc/openapi.json", "This document, where other servers have it", _DOCUMENT),
)
