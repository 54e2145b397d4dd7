"""Maps methods and paths to handlers. Pure. Expects percent-decoded paths, so `%2F` is a slash."""

from __future__ import annotations

import re
from typing import NamedTuple

from sie.values.api_key import Need


class Route(NamedTuple):
    """One row of the route table. handler names a method of the app; endpoint is an inference route's metric label.

    By default a route needs a key for inference.
    """

    template: str
    method: str
    handler: str
    envelope: str = "sie"
    endpoint: str = ""
    need: Need = "infer"
    also: str = ""
    """A second method of the same path."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The one or two methods of the row."""
        return (self.method, self.also) if self.also else (self.method,)


class Match(NamedTuple):
    """The route of a request. model is the part of the path at the placeholder, usually `{model}`."""

    route: Route
    model: str = ""


ENCODE = "/v1/encode/{model}"
INFER = "/v2/models/{model}/infer"
"""The templates of the two routes with a fast path."""
ROUTES: tuple[Route, ...] = (
    Route(ENCODE, "POST", "encode", endpoint="encode"),
    Route("/v1/score/{model}", "POST", "score", endpoint="score"),
    Route("/v1/extract/{model}", "POST", "extract", endpoint="extract"),
    Route("/v1/rerank", "POST", "rerank", "rerank", "score"),
    Route("/v1/embeddings", "POST", "embeddings", "openai", "embeddings"),
    Route("/v1/models", "GET", "list_models", "models"),
    Route("/v1/models/{model}", "GET", "show_model", "models"),
    Route("/v1/models/load", "POST", "manage_model", need="admin"),
    Route("/v1/models/unload", "POST", "manage_model", need="admin"),
    Route("/v1/models/reload", "POST", "manage_model", need="admin"),
    Route("/v1/models/status", "POST", "manage_model", need="admin"),
    Route("/v1/admin", "GET", "show_admin", need="admin"),
    Route("/v1/watch-ticket", "POST", "make_ticket", need="metrics"),
    Route("/healthz", "GET", "healthz", need="open"),
    Route("/readyz", "GET", "readyz", need="open"),
    Route("/health", "GET", "health", need="open"),
    Route("/metrics", "GET", "metrics", need="metrics"),
    Route("/", "GET", "home", need="open"),
    Route("/docs", "GET", "docs", need="open"),
    Route("/openapi.json", "GET", "openapi", need="open"),
    Route("/api-doc/openapi.json", "GET", "openapi", need="open"),
    Route("/v1/chat/completions", "POST", "chat", "text"),
    Route("/v1/completions", "POST", "completions", "text"),
    Route("/v1/messages", "POST", "messages", "anthropic"),
    Route("/v1/messages/count_tokens", "POST", "count_tokens", "anthropic"),
    Route("/v1/responses", "POST", "responses", "text"),
    Route("/v1/responses/input_tokens", "POST", "count_input", "text"),
    Route("/v1/responses/{response_id}", "GET", "show_response", "text"),
    Route("/v1/responses/{response_id}", "DELETE", "delete_response", "text"),
    Route("/v1/responses/{response_id}/cancel", "POST", "cancel_response", "text"),
    Route("/v1/responses/{response_id}/input_items", "GET", "list_input_items", "text"),
    Route("/v1/generate/{model}", "POST", "generate"),
    Route("/v2/models/{model}/generate", "POST", "model", "kserve"),
    Route("/v2/models/{model}/generate_stream", "POST", "model", "kserve"),
    Route("/v2", "GET", "server", "kserve"),
    Route("/v2/health/live", "GET", "live", "kserve", need="open"),
    Route("/v2/health/ready", "GET", "ready", "kserve", need="open"),
    Route("/v2/models/stats", "GET", "statistics", "kserve"),
    Route("/v2/models/{model}", "GET", "model", "kserve"),
    Route("/v2/models/{model}/ready", "GET", "model", "kserve"),
    Route("/v2/models/{model}/config", "GET", "model", "kserve"),
    Route("/v2/models/{model}/stats", "GET", "model", "kserve"),
    Route(INFER, "POST", "model", "kserve"),
    Route("/v2/repository/index", "POST", "index", "kserve"),
    Route("/v2/repository/models/{model}/load", "POST", "manage", "kserve", need="admin"),
    Route("/v2/repository/models/{model}/unload", "POST", "manage", "kserve", need="admin"),
    Route("/v2/repository/{model}", "POST", "named_repository", "kserve"),
    Route("/v2/systemsharedmemory/status", "GET", "shared_memory_status", "kserve"),
    Route("/v2/systemsharedmemory/unregister", "POST", "unregister", "kserve"),
    Route("/v2/systemsharedmemory/region/{model}", "POST", "region", "kserve", also="GET"),
    Route("/v2/cudasharedmemory/status", "GET", "shared_memory_status", "kserve"),
    Route("/v2/cudasharedmemory/unregister", "POST", "unregister", "kserve"),
    Route("/v2/cudasharedmemory/region/{model}", "POST", "region", "kserve", also="GET"),
    Route("/v2/trace/setting", "GET", "trace", "kserve", also="POST"),
    Route("/v2/models/{model}/trace/setting", "GET", "trace", "kserve", also="POST"),
    Route("/v2/logging", "GET", "logging", "kserve", also="POST"),
    Route("/v1/config", "GET", "config_statuses", "kserve"),
    Route("/v1/config/reload", "POST", "reload_config", "kserve", need="admin"),
    Route("/api/health/live", "GET", "live", "trtis", need="open"),
    Route("/api/health/ready", "GET", "ready", "trtis", need="open"),
    Route("/api/status", "GET", "status", "trtis"),
    Route("/api/status/{model}", "GET", "status", "trtis"),
    Route("/api/infer/{model}", "POST", "infer", "trtis"),
    Route("/api/modelcontrol/{model}", "POST", "control", "trtis", need="admin"),
    Route("/api/repository/index", "GET", "repository_index", "trtis"),
    Route("/api/sharedmemorycontrol/{model}", "POST", "refuse_shared_memory", "trtis", also="GET"),
    Route("/api/profile", "GET", "refuse_profile", "trtis"),
)
"""The OpenAPI document lists its paths in this order."""
BY_TEMPLATE: dict[str, Route] = {route.template: route for route in reversed(ROUTES)}
"""The first route of each template."""
BY_METHOD: dict[tuple[str, str], Route] = {
    (route.template, method): route for route in ROUTES for method in route.methods
}
COUNTED = {
    template: BY_TEMPLATE[template]._replace(endpoint=endpoint)
    for endpoint, templates in (
        ("infer", (INFER, "/api/infer/{model}")),
        ("generate", ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/generate/{model}",
                      "/v2/models/{model}/generate", "/v2/models/{model}/generate_stream")),
    )
    for template in templates
}  # fmt: skip
"""The routes with metric labels for tensor and text requests. A handler sets them after it has parsed the path."""
WEBSOCKETS: dict[str, Need] = {"/ws/status": "metrics"}
"""The path of each websocket and the scope it needs."""
_EXACT = {route.template: route for route in ROUTES if "{" not in route.template}
_PLACE = re.compile(r"(\{\w+\})")
_NAMED = [
    (*_PLACE.split(route.template), route)
    for route in ROUTES
    if "{" in route.template and BY_TEMPLATE[route.template] is route
]
_PREFIXES = list(dict.fromkeys(prefix for prefix, _, _, _ in _NAMED))
_AROUND = tuple(
    sorted(
        ((prefix, suffix, route) for prefix, _, suffix, route in _NAMED),
        key=lambda row: (_PREFIXES.index(row[0]), -len(row[1])),  # "/v2/models/m/infer" is not about a model "m/infer"
    )
)
"""The prefix and suffix around the placeholder of each template that has one."""
_START_CHARS = 8
_BY_START = {
    start: tuple(row for row in _AROUND if row[0].startswith(start))
    for start in {row[0][:_START_CHARS] for row in _AROUND}
}
"""`_AROUND` by the first characters of the path, so that a path is compared with few templates."""


def match(path: str) -> Match | None:
    """Return the route of a path, or None if unknown. The caller must check the method."""
    route = _EXACT.get(path)
    if route is not None:
        return Match(route)
    for prefix, suffix, candidate in _BY_START.get(path[:_START_CHARS], ()):
        if path.startswith(prefix) and path.endswith(suffix) and len(path) >= len(prefix) + len(suffix):
            return Match(candidate, path[len(prefix) : len(path) - len(suffix)])
    return None


def methods_of(route: Route) -> str:
    """Return the methods of a route's path, in the form of the header `Allow`."""
    return ", ".join(method for template, method in BY_METHOD if template == route.template)


def redirect_of(path: str) -> str | None:
    """Return the target of the redirect (307) for a path without its model, as the reference does for `/v1/encode`."""
    return next(
        (
            prefix
            for prefix, _, route in _AROUND
            if path == prefix[:-1] and path not in _EXACT and route.envelope == "sie"
        ),
        None,
    )
