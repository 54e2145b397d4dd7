"""Serves HTTP and websockets of one frontend process: the RSGI callable, dispatch, and the one error border.

The inference routes' handlers are in `sie.frontend.inference`; whatever a handler raises becomes an error in its
dialect's own shape in `App._fail`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from sie import __version__
from sie.control_messages import ModelEntry
from sie.errors import ClientGone, Internal, NotFound, Overloaded, SieError
from sie.frontend import dashboard, routes
from sie.frontend.admin import check_admin
from sie.frontend.dialects import models as models_dialect
from sie.frontend.dialects import openai, sie
from sie.frontend.inference import Exchange, Inference
from sie.frontend.metrics import CONTENT_TYPE, render
from sie.frontend.process import FrontendProcess
from sie.logs import get_logger
from sie.process import calm_collector

_log = get_logger(__name__)
_JSON: Final = ("content-type", "application/json")
_TEXT: Final = ("content-type", "text/plain; charset=utf-8")
_CLOSE: Final = ("connection", "close")
_MUST_CLOSE: Final = frozenset({408, 413})
"""After these the rest of a body may still be on its way."""


class App:
    """What Granian calls. One instance per process."""

    def __init__(self, connect: Callable[[asyncio.AbstractEventLoop], FrontendProcess]) -> None:
        self._connect = connect
        self._identity = (
            ("x-sie-server-version", __version__),
            ("x-sie-served-by", "local"),
            ("x-sie-runtime-instance", secrets.token_hex(32)),
        )

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Join the supervisor before the first connection is accepted."""
        self._process = self._connect(loop)
        self._inference = Inference(self._process, self._identity)
        calm_collector()

    def __rsgi_del__(self, _loop: asyncio.AbstractEventLoop) -> None:
        """Leave, when Granian has finished every request."""
        self._process.close()

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        """Serve one request or websocket."""
        if scope.proto == "ws":
            await self._serve_websocket(scope, protocol)
            return
        exchange = Exchange(scope, protocol, time.monotonic_ns())
        try:
            await self._dispatch(exchange)
        except SieError as error:
            self._fail(exchange, error)
        except Exception:
            _log.exception("%s %s failed", scope.method, exchange.route.template if exchange.route else "?")
            self._fail(exchange, Internal("internal error"))

    async def _serve_websocket(self, scope: Any, protocol: Any) -> None:
        if scope.path != routes.WS_STATUS:
            protocol.close(404)
            return
        await self._process.status.serve(protocol)

    async def _dispatch(self, exchange: Exchange) -> None:
        scope = exchange.scope
        matched = routes.match(scope.path)
        if matched is None:
            target = routes.redirect_of(scope.path)
            if target is not None and scope.method == "POST":
                self._respond(exchange, 307, [("location", target)], b"")
                return
            self._respond(exchange, 404, [_JSON], sie.not_found_body())
            return
        exchange.route, exchange.model = matched.route, matched.model
        if scope.method != matched.route.method:
            self._respond(exchange, 405, [_JSON, ("allow", matched.route.method)], sie.method_not_allowed_body())
            return
        if not matched.route.endpoint:
            await getattr(self, f"_{matched.route.handler}")(exchange)
            return
        headers, body = await getattr(self._inference, matched.route.handler)(exchange)
        self._respond(exchange, 200, headers, body)

    # --- everything else ------------------------------------------------------------------------------------------

    async def _list_models(self, exchange: Exchange) -> None:
        models = self._process.models
        infos = [_info(entry, models.created_s) for entry in models.entries.values()]
        default = self._process.default_model("dense")
        self._respond(exchange, 200, [_JSON], models_dialect.models_body(infos, default))

    async def _show_model(self, exchange: Exchange) -> None:
        models = self._process.models
        entry = models.find(exchange.model)
        if entry is None:
            error = sie.model_not_found(exchange.model, models.entries)
            self._respond(exchange, 404, [_JSON], models_dialect.model_not_found_body(error))
            return
        self._respond(exchange, 200, [_JSON], models_dialect.model_body(_info(entry, models.created_s)))

    async def _manage_model(self, exchange: Exchange) -> None:
        process, headers = self._process, exchange.headers
        check_admin(process.settings.server.admin_from, exchange.scope.client, headers)
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        body = await process.bodies.read(headers, exchange.protocol, exchange.deadline_ns)
        exchange.body_bytes = len(body)
        verb = exchange.scope.path.rpartition("/")[2]
        answer = await process.admin.serve(verb, body, exchange.deadline_ns)
        self._respond(exchange, answer.http_status, [_JSON], answer.body)

    async def _show_admin(self, exchange: Exchange) -> None:
        """Tell a page whether its buttons would work."""
        check_admin(self._process.settings.server.admin_from, exchange.scope.client, exchange.headers, has_body=False)
        self._respond(exchange, 200, [_JSON], b'{"allowed":true}')

    async def _healthz(self, exchange: Exchange) -> None:
        self._respond(exchange, 200, [_TEXT], b"ok")

    async def _readyz(self, exchange: Exchange) -> None:
        if self._process.is_ready:
            self._respond(exchange, 200, [_TEXT], b"ok")
        else:
            self._respond(exchange, 503, [_TEXT], b"not ready")

    async def _health(self, exchange: Exchange) -> None:
        self._respond(exchange, 200, [_TEXT], b"OK")

    async def _metrics(self, exchange: Exchange) -> None:
        self._respond(exchange, 200, [("content-type", CONTENT_TYPE)], render(self._process.pages))

    async def _home(self, exchange: Exchange) -> None:
        if "text/html" in (exchange.headers.get("accept") or ""):
            self._respond(exchange, 200, dashboard.headers(), dashboard.page())
        else:
            self._respond(exchange, 200, [_TEXT], b"OK")

    # --- the border -----------------------------------------------------------------------------------------------

    def _fail(self, exchange: Exchange, error: SieError) -> None:
        """Answer with an error in the shape of the route's dialect."""
        envelope = exchange.route.envelope if exchange.route is not None else "sie"
        if isinstance(error, ClientGone):
            if (access_log := self._process.access_log) is not None:
                access_log.record(exchange, error.http_status, [], error)
            self._count(exchange, error.http_status, error)
            return
        if envelope == "openai" and isinstance(error, NotFound):
            body = models_dialect.model_not_found_body(error)
        else:
            body = openai.error_body(error) if envelope == "openai" else sie.error_body(error)
        headers: list[tuple[str, str]] = [_JSON, *self._identity]
        if error.retry_after_s is not None:
            headers.append(("retry-after", str(error.retry_after_s)))
        if error.http_status in _MUST_CLOSE:
            headers.append(_CLOSE)
        self._respond(exchange, error.http_status, headers, body, error)

    def _respond(
        self,
        exchange: Exchange,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        error: SieError | None = None,
    ) -> None:
        if self._process.is_draining and _CLOSE not in headers:
            headers = [*headers, _CLOSE]
        if (access_log := self._process.access_log) is not None:
            headers = access_log.record(exchange, status, headers, error)
        exchange.protocol.response_bytes(status, headers, body)
        self._count(exchange, status, error)

    def _count(self, exchange: Exchange, status: int, error: SieError | None) -> None:
        metrics, route = self._process.metrics, exchange.route
        total_s = (time.monotonic_ns() - exchange.began_ns) / 1e9
        template = route.template if route is not None else "unmatched"
        metrics.record_http(
            exchange.scope.method if route is not None else "ANY", template, exchange.known_model, status,
            duration_s=total_s, body_bytes=exchange.body_bytes,
        )  # fmt: skip
        if error is not None and error.retryable:
            metrics.record_refusal(error.code)
        if route is None or not route.endpoint or status == 405:
            return
        outcome = "success" if error is None else "queue_full" if isinstance(error, Overloaded) else "error"
        model = exchange.known_model or "unknown"
        timing = exchange.timing
        if timing is None:
            metrics.record_request(model, route.endpoint, outcome, total_s)
        else:
            metrics.record_request(
                model, route.endpoint, outcome, total_s, queue_s=timing.queue_ms / 1e3,
                tokenize_s=timing.tokenization_ms / 1e3, inference_s=timing.inference_ms / 1e3,
            )  # fmt: skip


def _info(entry: ModelEntry, created_s: int) -> dict[str, Any]:
    error = entry.error
    last_error = None
    if error is not None:
        extras = error.extras
        last_error = {
            "code": error.code,
            "message": error.message,
            "attempts": extras.get("attempts", 1),
            "permanent": extras.get("permanent", False),
        }
    loras = {name: adapter.state for name, adapter in entry.adapters.items()}
    return models_dialect.model_info(entry.card, entry.state, last_error, created_s, loras)
