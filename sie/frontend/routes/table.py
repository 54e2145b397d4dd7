"""Lists every HTTP route: its path, method, handler, dialect, metric label and required scope. Pure.

The rows of routes on existing operations are in the descriptions of their dialects (`sie.frontend.dialects.registry`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sie.frontend.dialects.description import Codec, TextCodec
from sie.frontend.dialects.registry import rows_of
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.response import FileResponse, Response
from sie.frontend.http.routing import Match, Route, RouteTable, Row
from sie.frontend.http.stream import Streamed
from sie.frontend.routes.handlers import Handlers
from sie.frontend.services.kserve_service import KServeService
from sie.frontend.tensors.model_paths import split_model_path
from sie.values.api_key import Need

if TYPE_CHECKING:
    from sie.frontend.routes.generate import TextHandler, TextRoutes
    from sie.frontend.routes.store_requests import StoredHandler

Handler = Callable[[Exchange], Awaitable[Response | FileResponse | Streamed]]
"""Serves one request. Raises; the app's error boundary answers with the error."""
Find = Callable[[Handlers], Handler]
"""Finds the handler of one route among those of a process."""

_MODEL: Final = "/v2/models/{model}"
_GENERATION: Final = "sie.frontend.routes.generate"
_PROTOBUF: Final = "sie.frontend.routes.trtis"


def _sie(template: str, method: str, handler: Find, envelope: str = "sie", *, need: Need = "infer") -> Row:
    return Row(template, method, envelope, "", need, handler=handler)


def _text(
    template: str,
    method: str,
    handler: Callable[[TextRoutes], TextHandler],
    envelope: str = "text",
    *,
    label: str = "generate",
) -> Row:
    def find(handlers: Handlers) -> Handler:
        return handlers.texts.served(handler(handlers.texts))

    return Row(template, method, envelope, label, handler=find, imports=_GENERATION)


def _kept(module: str, template: str, method: str, handler: Callable[[Handlers], StoredHandler]) -> Row:
    def find(handlers: Handlers) -> Handler:
        from sie.frontend.routes.store_requests import served

        return served(handler(handlers))

    return Row(template, method, "text", handler=find, imports=f"sie.frontend.routes.{module}")


def _v2(template: str, method: str, handler: Find, *, label: str = "", need: Need = "infer", also: str = "") -> Row:
    return Row(template, method, "kserve", label, need, also, handler=handler)


def _v2_value(template: str, value: Callable[[KServeService, Exchange], Any]) -> Row:
    return _v2(template, "GET", lambda handlers: handlers.kserve.showing(value))


def _v1(template: str, method: str, handler: Find, *, label: str = "", need: Need = "infer", also: str = "") -> Row:
    return Row(template, method, "trtis", label, need, also, handler=handler, imports=_PROTOBUF)


INFER: Final = _v2(f"{_MODEL}/infer", "POST", lambda s: s.kserve.infer, label="infer")
"""The second route with a fast path, after `ENCODE`."""
TABLE: Final = RouteTable((
    *rows_of(Codec),
    _sie("/v1/models", "GET", lambda s: s.cards.list_models, "models"),
    _sie("/v1/models/{model}", "GET", lambda s: s.cards.show_model, "models"),
    _sie("/v1/models/load", "POST", lambda s: s.cards.manage_model, need="admin"),
    _sie("/v1/models/unload", "POST", lambda s: s.cards.manage_model, need="admin"),
    _sie("/v1/models/reload", "POST", lambda s: s.cards.manage_model, need="admin"),
    _sie("/v1/models/status", "POST", lambda s: s.cards.manage_model, need="admin"),
    _sie("/v1/admin", "GET", lambda s: s.cards.show_admin, need="admin"),
    _sie("/v1/pools", "GET", lambda s: s.cluster.list_pools),
    _sie("/v1/pools", "POST", lambda s: s.cluster.put_pool, need="admin"),
    _sie("/v1/pools/{name}", "GET", lambda s: s.cluster.show_pool),
    _sie("/v1/pools/{name}", "DELETE", lambda s: s.cluster.delete_pool, need="admin"),
    _sie("/v1/pools/{name}/renew", "POST", lambda s: s.cluster.renew_pool, need="admin"),
    _sie("/v1/configs/models", "GET", lambda s: s.cluster.list_configs),
    _sie("/v1/configs/models", "POST", lambda s: s.cluster.put_config, need="admin"),
    _sie("/v1/configs/models/{model}", "GET", lambda s: s.cluster.show_config),
    _sie("/v1/configs/models/{model}/status", "GET", lambda s: s.cluster.show_config_status),
    _sie("/v1/configs/bundles", "GET", lambda s: s.cluster.list_bundles),
    _sie("/v1/configs/bundles/{bundle}", "GET", lambda s: s.cluster.show_bundle),
    _sie("/v1/configs/resolve", "POST", lambda s: s.cluster.resolve_config),
    _sie("/v1/configs/export", "GET", lambda s: s.cluster.export_configs),
    _sie("/v1/configs/epoch", "GET", lambda s: s.cluster.show_epoch),
    _sie("/v1/watch-ticket", "POST", lambda s: s.pages.make_ticket, need="metrics"),
    _sie("/healthz", "GET", lambda s: s.pages.healthz, need="open"),
    _sie("/readyz", "GET", lambda s: s.pages.readyz, need="open"),
    _sie("/health", "GET", lambda s: s.pages.health, need="open"),
    _sie("/metrics", "GET", lambda s: s.pages.metrics, need="metrics"),
    _sie("/", "GET", lambda s: s.pages.home, need="open"),
    _sie("/docs", "GET", lambda s: s.pages.docs, need="open"),
    _sie("/chat", "GET", lambda s: s.pages.chat, need="open"),
    _sie("/openapi.json", "GET", lambda s: s.pages.openapi, need="open"),
    _sie("/api-doc/openapi.json", "GET", lambda s: s.pages.openapi, need="open"),
    *rows_of(TextCodec),
    _text("/v1/messages/count_tokens", "POST", lambda t: t.count_tokens, "anthropic", label=""),
    _text("/v1/responses", "POST", lambda t: t.responses),
    _text("/v1/responses/input_tokens", "POST", lambda t: t.count_input, label=""),
    _text("/v1/responses/{response_id}", "GET", lambda t: t.show_response, label=""),
    _text("/v1/responses/{response_id}", "DELETE", lambda t: t.delete_response, label=""),
    _text("/v1/responses/{response_id}/cancel", "POST", lambda t: t.cancel_response, label=""),
    _text("/v1/responses/{response_id}/input_items", "GET", lambda t: t.list_input_items, label=""),
    Row("/v1/agent/approvals/{approval_id}", "POST", "text", "", handler=lambda s: s.agents.decide,
        imports="sie.frontend.routes.agents"),
    _kept("files", "/v1/files", "GET", lambda s: s.files.list_files),
    _kept("files", "/v1/files", "POST", lambda s: s.files.upload),
    _kept("files", "/v1/files/{file_id}", "GET", lambda s: s.files.show),
    _kept("files", "/v1/files/{file_id}", "DELETE", lambda s: s.files.delete),
    _kept("files", "/v1/files/{file_id}/content", "GET", lambda s: s.files.send),
    _kept("files", "/v1/containers/{container_id}/files", "GET", lambda s: s.files.list_in_container),
    _kept("files", "/v1/containers/{container_id}/files/{file_id}", "GET", lambda s: s.files.show_in_container),
    _kept("files", "/v1/containers/{container_id}/files/{file_id}/content", "GET", lambda s: s.files.send_from_container),
    _kept("skills", "/v1/skills", "GET", lambda s: s.skills.list_skills),
    _kept("skills", "/v1/skills", "POST", lambda s: s.skills.create),
    _kept("skills", "/v1/skills/{skill_id}", "GET", lambda s: s.skills.show),
    _kept("skills", "/v1/skills/{skill_id}", "POST", lambda s: s.skills.update),
    _kept("skills", "/v1/skills/{skill_id}", "DELETE", lambda s: s.skills.delete),
    _kept("skills", "/v1/skills/{skill_id}/content", "GET", lambda s: s.skills.send),
    _kept("skills", "/v1/skills/{skill_id}/versions", "GET", lambda s: s.skills.list_versions),
    _kept("skills", "/v1/skills/{skill_id}/versions", "POST", lambda s: s.skills.add_version),
    _kept("skills", "/v1/skills/{skill_id}/versions/{version}", "GET", lambda s: s.skills.show_version),
    _kept("skills", "/v1/skills/{skill_id}/versions/{version}", "DELETE", lambda s: s.skills.delete_version),
    _kept("skills", "/v1/skills/{skill_id}/versions/{version}/content", "GET", lambda s: s.skills.send_version),
    _kept("sessions", "/v1/sessions/{session_id}", "GET", lambda s: s.sessions.show),
    _kept("sessions", "/v1/sessions/{session_id}", "PUT", lambda s: s.sessions.replace),
    _kept("sessions", "/v1/sessions/{session_id}", "DELETE", lambda s: s.sessions.delete),
    _text("/v1/generate/{model}", "POST", lambda t: t.generate, "sie"),
    _text(f"{_MODEL}/generate", "POST", lambda t: t.generate_tensor, "kserve"),
    _text(f"{_MODEL}/generate_stream", "POST", lambda t: t.generate_tensor_stream, "kserve"),
    _v2_value("/v2", lambda s, _: s.server()),
    _v2("/v2/health/live", "GET", lambda s: s.kserve.done, need="open"),
    _v2("/v2/health/ready", "GET", lambda s: s.kserve.ready, need="open"),
    _v2_value("/v2/models/stats", lambda s, _: s.statistics()),
    _v2_value(_MODEL, lambda s, x: s.metadata(x, x.model, x.version)),
    _v2(f"{_MODEL}/ready", "GET", lambda s: s.kserve.model_ready),
    _v2_value(f"{_MODEL}/config", lambda s, x: s.config(x, x.model, x.version)),
    _v2_value(f"{_MODEL}/stats", lambda s, x: s.statistics(x.model, x.version)),
    INFER,
    _v2("/v2/repository/index", "POST", lambda s: s.kserve.index),
    _v2("/v2/repository/models/{model}/load", "POST", lambda s: s.kserve.load, need="admin"),
    _v2("/v2/repository/models/{model}/unload", "POST", lambda s: s.kserve.unload, need="admin"),
    _v2("/v2/repository/{model}", "POST", lambda s: s.kserve.named_repository),
    _v2_value("/v2/systemsharedmemory/status", lambda s, x: s.regions(x)),
    _v2("/v2/systemsharedmemory/unregister", "POST", lambda s: s.kserve.unregister_regions),
    _v2("/v2/systemsharedmemory/region/{model}", "POST", lambda s: s.kserve.region, also="GET"),
    _v2_value("/v2/cudasharedmemory/status", lambda _s, _x: []),
    _v2("/v2/cudasharedmemory/unregister", "POST", lambda s: s.kserve.done),
    _v2("/v2/cudasharedmemory/region/{model}", "POST", lambda s: s.kserve.device_region, also="GET"),
    _v2("/v2/trace/setting", "GET", lambda s: s.kserve.trace, also="POST"),
    _v2(f"{_MODEL}/trace/setting", "GET", lambda s: s.kserve.trace, also="POST"),
    _v2("/v2/logging", "GET", lambda s: s.kserve.logging, also="POST"),
    _v2_value("/v1/config", lambda s, _: s.config_statuses()),
    _v2("/v1/config/reload", "POST", lambda s: s.kserve.reload_config, need="admin"),
    _v1("/api/health/live", "GET", lambda s: s.trtis.health, need="open"),
    _v1("/api/health/ready", "GET", lambda s: s.trtis.health, need="open"),
    _v1("/api/status", "GET", lambda s: s.trtis.status),
    _v1("/api/status/{model}", "GET", lambda s: s.trtis.status),
    _v1("/api/infer/{model}", "POST", lambda s: s.trtis.infer, label="infer"),
    _v1("/api/modelcontrol/{model}", "POST", lambda s: s.trtis.control, need="admin"),
    _v1("/api/repository/index", "GET", lambda s: s.trtis.repository_index),
    _v1("/api/sharedmemorycontrol/{model}", "POST", lambda s: s.trtis.refuse_shared_memory, also="GET"),
    _v1("/api/profile", "GET", lambda s: s.trtis.refuse_profile),
))  # fmt: skip
WEBSOCKETS: Final[dict[str, Need]] = {"/ws/status": "metrics"}
"""The path of each websocket and the scope it needs."""
CLUSTER_STATUS: Final = "/ws/cluster-status"
"""The path of a gateway's own websocket, which needs the scope of the others."""

_ACTIONS: Final = ("", "ready", "config", "stats", "infer", "generate", "generate_stream")
"""The actions that may follow a model's name, or its version, in a path of KServe."""
_ROWS_OF_ACTION: Final = {
    action: next(row for row in TABLE if row.template == (f"{_MODEL}/{action}" if action else _MODEL))
    for action in _ACTIONS
}
_OF_MODELS: Final = frozenset(_ROWS_OF_ACTION.values())


_MAX_CACHED_CHARS: Final = 256
_cached_match: Final = lru_cache(maxsize=1024)(TABLE.match)


def match_path(path: str) -> Match | None:
    """Return the route of a path as `TABLE.match` does, for short paths from a cache: clients repeat them."""
    return _cached_match(path) if len(path) <= _MAX_CACHED_CHARS else TABLE.match(path)


def find_route(path: str, known: Container[str]) -> Match | None:
    """Return the route of a path, or None if unknown. known is the names of the tensor models.

    A name of a KServe model may hold slashes, so the known names decide which part of a path is the name.
    """
    found = match_path(path)
    if found is None or found.route not in _OF_MODELS:
        return found
    below = split_model_path(path.removeprefix("/v2/models/"), _ACTIONS, known)
    return Match(_ROWS_OF_ACTION[below.action], below.name, below.version) if below is not None else None


def is_unknown_action(route: Route, model: str, known: Container[str]) -> bool:
    """Return whether a path of KServe has an unknown action after a model's name."""
    return route.template == _MODEL and "/" in model and model not in known
