"""Owns the route table: which method and path means what. Pure. Paths come percent-decoded, so `%2F` is a slash."""

from __future__ import annotations

from typing import Literal, NamedTuple

from sie.api_keys import Scope

Need = Scope | Literal["any", "open"]
"""What a route asks of a client where there are API keys: a key with this scope, any key, or nothing."""


class Route(NamedTuple):
    """One row: handler names a method of the app; endpoint is the metrics' word for an inference route.

    A row that says nothing about its need is closed to clients without a key for inference.
    """

    template: str
    method: str
    handler: str
    envelope: str = "sie"
    endpoint: str = ""
    need: Need = "infer"


class Match(NamedTuple):
    """The route of a request; model is the path's tail for the templates that end in `{model}`."""

    route: Route
    model: str = ""


ROUTES: tuple[Route, ...] = (
    Route("/v1/encode/{model}", "POST", "encode", endpoint="encode"),
    Route("/v1/score/{model}", "POST", "score", endpoint="score"),
    Route("/v1/extract/{model}", "POST", "extract", endpoint="extract"),
    Route("/v1/rerank", "POST", "rerank", "openai", "score"),
    Route("/v1/embeddings", "POST", "embeddings", "openai", "embeddings"),
    Route("/v1/models", "GET", "list_models", "models"),
    Route("/v1/models/load", "POST", "manage_model", need="admin"),
    Route("/v1/models/unload", "POST", "manage_model", need="admin"),
    Route("/v1/models/reload", "POST", "manage_model", need="admin"),
    Route("/v1/models/status", "POST", "manage_model", need="admin"),
    Route("/v1/admin", "GET", "show_admin", need="admin"),
    Route("/v1/watch-ticket", "POST", "make_ticket", need="metrics"),
    Route("/v1/models/{model}", "GET", "show_model", "models"),
    Route("/healthz", "GET", "healthz", need="open"),
    Route("/readyz", "GET", "readyz", need="open"),
    Route("/health", "GET", "health", need="open"),
    Route("/metrics", "GET", "metrics", need="metrics"),
    Route("/openapi.json", "GET", "openapi", need="open"),
    Route("/api-doc/openapi.json", "GET", "openapi", need="open"),
    Route("/docs", "GET", "docs", need="open"),
    Route("/", "GET", "home", need="open"),
)
WEBSOCKETS: dict[str, Need] = {"/ws/status": "metrics"}
"""Path and need of each websocket."""
_TAIL = "{model}"
_EXACT = {route.template: route for route in ROUTES if not route.template.endswith(_TAIL)}
_PREFIXES = tuple((route.template[: -len(_TAIL)], route) for route in ROUTES if route.template.endswith(_TAIL))


def match(path: str) -> Match | None:
    """Return the route of a path, or None for an unknown one; the caller compares the method."""
    route = _EXACT.get(path)
    if route is not None:
        return Match(route)
    for prefix, candidate in _PREFIXES:
        if path.startswith(prefix):
            return Match(candidate, path[len(prefix) :])
    return None


def redirect_of(path: str) -> str | None:
    """Return where a path without its tail is sent (307), as the reference does for `/v1/encode`."""
    return next((prefix for prefix, _ in _PREFIXES if path == prefix[:-1] and path not in _EXACT), None)
