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
from sie.values.host_pool import PoolBody
from sie.values.shared_config import ModelConfig, ResolveBody


class ModelStatus(Reply):
    model_id: str
    status: Literal["loaded", "unloaded", "loading", "unloading", "reloading", "failed", "not_found"]
    error: str | UnsetType = UNSET
    detail: ErrorDetail | UnsetType = UNSET


class WatchTicket(Reply):
    ticket: str


class AdminAllowed(Reply):
    allowed: Literal[True]


class PoolSpec(Reply):
    name: str
    queue_pool: str
    bundle: str | None
    gpus: dict[str, int]
    gpu_caps: dict[str, int]
    ttl_seconds: int | None
    minimum_worker_count: int
    pinned_models: list[str]


class PoolHost(Reply):
    name: str
    url: str
    gpu: str


class PoolStatus(Reply):
    state: Literal["pending", "active", "expired"]
    assigned_workers: list[PoolHost]
    created_at: float | None
    last_renewed: float | None


class Pool(Reply):
    name: str
    state: Literal["pending", "active", "expired"]
    gpus: dict[str, int]
    worker_count: int
    spec: PoolSpec
    status: PoolStatus


class PoolList(Reply):
    pools: list[Pool]


class Done(Reply):
    message: str


_HTML: Final = "text/html"
_TAG: Final = "Operation"
CLUSTER_TAG: Final = "Cluster"
TAGS: Final = {
    MODELS: "The served models, and for administrators the models in memory.",
    _TAG: "Health, metrics and this document.",
    CLUSTER_TAG: "Pools of hosts; a gateway serves these routes, and a server on its own answers 404.",
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


_NATS_AWAY: Final = Fault(503, ("UPSTREAM_UNAVAILABLE",), "NATS does not answer; `Retry-After` says when to retry.")
_NO_POOL: Final = Fault(404, ("POOL_NOT_FOUND", "NOT_A_GATEWAY"), "The pool was not found.")


def _pool(template: str, method: str, summary: str, *answers: Answer, description: str = "") -> Operation:
    """Return the row of a route of pools; those that name a pool may not find it, and those that change one need NATS."""
    is_change = method != "GET"
    posts = template == "/v1/pools" and is_change
    return Operation(
        template=template, method=method, tag=CLUSTER_TAG, summary=summary, description=description, answers=answers,
        request=PoolBody if posts else None, example={"name": "bench", "gpus": {"l4": 2}} if posts else {},
        model="bench" if "{name}" in template else "",
        faults=(
            *((Fault(400, ("INVALID_INPUT",), "The body does not describe a pool."),) if posts else ()),
            *((FORBIDDEN, _NATS_AWAY) if is_change else ()),
            *((STALLED, TOO_LARGE) if posts else ()),
            _NO_POOL,
        ),
    )  # fmt: skip


_YAML: Final = "application/yaml"
_NO_CONFIG: Final = Fault(404, ("CONFIG_NOT_FOUND", "MODEL_NOT_FOUND", "NOT_A_GATEWAY"), "It was not found.")


def _config(path: str, summary: str, answer: str, *, media: str = JSON, model: str = "") -> Operation:
    return Operation(
        template=f"/v1/configs/{path}", method="GET", tag=CLUSTER_TAG, summary=summary,
        answers=(Answer(200, answer, (media,)),), model=model, faults=(_NO_CONFIG,),
    )  # fmt: skip


_CONFIGS: Final = (
    _config("models", "List the models", "Each with its profiles, the bundles that have it, and its hosts."),
    Operation(
        template="/v1/configs/models",
        method="POST",
        tag=CLUSTER_TAG,
        summary="Add a model or profiles for all hosts",
        description="The body may also be YAML. Profiles are only added. `Idempotency-Key` makes a repetition harmless, and "
        "`If-Match` with an epoch refuses what was decided on an older state. `admin_from` says which clients may do this.",
        request=ModelConfig,
        media=(JSON, _YAML),
        example={"sie_id": "org/model", "profiles": {"short": {"adapter_options": {"runtime": {"normalize": True}}}}},
        answers=(Answer(201, "Profiles were added."), Answer(200, "All were there already, and nothing has changed.")),
        faults=(
            Fault(400, ("INVALID_INPUT",), "A header has a wrong form."),
            FORBIDDEN,
            _NO_CONFIG,
            STALLED,
            Fault(409, ("CONFIG_CONFLICT",), "A profile has another definition, or the epoch has passed."),
            TOO_LARGE,
            Fault(422, ("INVALID_CONFIG", "IDEMPOTENCY_KEY_REUSED"), "The body is not a configuration."),
            _NATS_AWAY,
        ),
    ),
    _config("models/{model}", "Show a model's configuration", "As YAML.", media=_YAML, model="org/model"),
    _config("models/{model}/status", "Which hosts run a configuration", "Each with its hash.", model="org/model"),
    _config("bundles", "List the bundles", "Each with its models and hosts."),
    _config("bundles/{bundle}", "Show a bundle", "Its models and hosts.", model="default"),
    Operation(
        template="/v1/configs/resolve",
        tag=CLUSTER_TAG,
        summary="What the name of a model means",
        request=ResolveBody,
        example={"model": "default:/org/model:short"},
        answers=(Answer(200, "The model, the profile and the bundles that have it."),),
        faults=(
            Fault(400, ("INVALID_INPUT",), "The body does not name a model."),
            _NO_CONFIG,
            STALLED,
            Fault(409, ("DEPENDENCY_CONFLICT",), "The bundle does not have the model."),
            TOO_LARGE,
        ),
    ),
    _config("export", "Export all configurations", "As they can be posted again."),
    _config("epoch", "Show the epoch", "It counts the changes."),
)

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
    _pool("/v1/pools", "GET", "List the pools", Answer(200, "All pools.", type=PoolList)),
    _pool(
        "/v1/pools",
        "POST",
        "Create or update a pool",
        Answer(201, "The pool was created.", type=Pool),
        Answer(200, "The pool was updated, and its lease renewed.", type=Pool),
        description="`admin_from` says which clients may do this.",
    ),
    _pool("/v1/pools/{name}", "GET", "Show a pool", Answer(200, "The pool.", type=Pool)),
    _pool(
        "/v1/pools/{name}", "DELETE", "Delete a pool", Answer(200, "Its hosts work for their queue pool.", type=Done)
    ),
    _pool("/v1/pools/{name}/renew", "POST", "Renew a pool's lease", Answer(200, "The lease begins anew.", type=Done)),
    *_CONFIGS,
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
        Answer(
            200,
            "`ok`: every model named at the start is loaded; without `strict_readiness`, those that can be.",
            (TEXT,),
        ),
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
    _text("/chat", "A page to talk to a model", Answer(200, "A page that loads nothing from other servers.", (_HTML,))),
    _text("/docs", "This document as a page", Answer(200, "A page that loads nothing from other servers.", (_HTML,))),
    _text("/openapi.json", "This document", _DOCUMENT),
    _text("/api-doc/openapi.json", "This document, at the path of other servers", _DOCUMENT),
)
