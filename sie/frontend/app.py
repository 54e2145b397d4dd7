"""Serves HTTP and websockets of one frontend process: the RSGI callable, the handlers, and the one error border.

A handler decodes with its dialect, runs the operation and answers; whatever it raises becomes an error in the
dialect's own shape in `App._fail`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sie import __version__
from sie.control import ModelEntry
from sie.errors import BadRequest, ClientGone, Internal, NotFound, Overloaded, SieError, Unavailable
from sie.frontend import dashboard, routes
from sie.frontend.dialects import models as models_dialect
from sie.frontend.dialects import negotiate, openai, rerank, score, sie
from sie.frontend.links import Reply
from sie.frontend.metrics import CONTENT_TYPE, render
from sie.frontend.process import FrontendProcess
from sie.frontend.replies import read_reply
from sie.frontend.score import read_scores
from sie.logs import get_logger
from sie.process import calm_collector
from sie.settings import Limits
from sie.types import EncodeReply, EncodeRequest, ScoreReply, ScoreRequest, Timing

_log = get_logger(__name__)
_JSON: Final = ("content-type", "application/json")
_TEXT: Final = ("content-type", "text/plain; charset=utf-8")
_CLOSE: Final = ("connection", "close")
_LARGE_BODY_BYTES: Final = 64 * 1024
"""From here a body is decoded, and a reply of as many bytes as JSON encoded, on a thread."""
_MUST_CLOSE: Final = frozenset({408, 413})
"""After these the rest of a body may still be on its way."""


class Exchange:
    """One HTTP request while it is served: what the border needs to know to answer and to count it."""

    __slots__ = ("began_ns", "body_bytes", "deadline_ns", "headers", "known_model", "model", "num_items", "protocol",
                 "route", "scope", "timing", "waits")  # fmt: skip

    def __init__(self, scope: Any, protocol: Any, began_ns: int) -> None:
        self.scope = scope
        self.headers = scope.headers
        self.protocol = protocol
        self.began_ns = began_ns
        self.deadline_ns = 0
        self.route: routes.Route | None = None
        self.model = ""
        self.known_model = ""
        self.body_bytes = 0
        self.num_items = 0
        self.timing: Any = None
        self.waits = False
        """Whether it waits for a model that loads, instead of hearing so at once."""


class App:
    """What Granian calls. One instance per process."""

    def __init__(self, connect: Callable[[asyncio.AbstractEventLoop], FrontendProcess]) -> None:
        self._connect = connect
        self._pool = ThreadPoolExecutor(2, "decode")
        self._identity = (
            ("x-sie-server-version", __version__),
            ("x-sie-served-by", "local"),
            ("x-sie-runtime-instance", secrets.token_hex(32)),
        )

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Join the supervisor before the first connection is accepted."""
        self._process = self._connect(loop)
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
        await getattr(self, f"_{matched.route.handler}")(exchange)

    # --- inference ------------------------------------------------------------------------------------------------

    async def _encode(self, exchange: Exchange) -> None:
        headers = exchange.headers
        self._check_headers(exchange)
        body = await self._read(exchange)
        is_msgpack = negotiate.is_msgpack(headers.get("content-type"))
        request = await self._decode(sie.decode_encode, body, is_msgpack, exchange.model, self._limits)
        entry = self._find(exchange, exchange.model)
        request = sie.resolve_encode(request, entry.card)
        reply, raw = await self._run(exchange, entry, request)
        wants_msgpack = negotiate.wants_msgpack(headers.get("accept"))
        try:
            if wants_msgpack or len(raw.view) < _LARGE_BODY_BYTES:
                answer = sie.encode_reply(reply, wants_msgpack)
            else:
                answer = await self._on_thread(sie.encode_reply, reply, wants_msgpack)
        finally:
            _let_go(reply, raw)
        content_type = ("content-type", negotiate.content_type(wants_msgpack))
        self._respond(exchange, 200, [content_type, *_timing_headers(reply.timing), *self._identity], answer)

    async def _score(self, exchange: Exchange) -> None:
        self._check_headers(exchange)
        body = await self._read(exchange)
        is_msgpack = negotiate.is_msgpack(exchange.headers.get("content-type"))
        request = await self._decode(score.decode_score, body, is_msgpack, exchange.model, self._limits)
        entry = self._find(exchange, exchange.model)
        request = score.resolve_score(request, entry.card)
        reply = await self._run_score(exchange, entry, request)
        wants_msgpack = negotiate.wants_msgpack(exchange.headers.get("accept"))
        content_type = ("content-type", negotiate.content_type(wants_msgpack))
        answer = score.encode_scores(request, reply, wants_msgpack)
        self._respond(exchange, 200, [content_type, *_timing_headers(reply.timing), *self._identity], answer)

    async def _rerank(self, exchange: Exchange) -> None:
        self._check_headers(exchange)
        body = await self._read(exchange)
        call = await self._decode(rerank.decode_rerank, body, self._limits)
        request = call.request
        request.model = self._process.resolve_default(request.model, "score")
        entry = self._find(exchange, request.model)
        request = rerank.resolve_rerank(request, entry.card)
        reply = await self._run_score(exchange, entry, request)
        answer = rerank.encode_ranking(call, reply)
        self._respond(exchange, 200, [_JSON, *_timing_headers(reply.timing), *self._identity], answer)

    async def _embeddings(self, exchange: Exchange) -> None:
        self._check_headers(exchange)
        body = await self._read(exchange)
        call = await self._decode(openai.decode_embeddings, body, exchange.headers.get("content-type"), self._limits)
        request = call.request
        request.model = self._process.resolve_default(request.model, "dense")
        entry = self._find(exchange, request.model)
        request = openai.resolve_embeddings(request, entry.card)
        reply, raw = await self._run(exchange, entry, request)
        try:
            if call.base64 or len(raw.view) < _LARGE_BODY_BYTES:
                answer = openai.encode_embeddings(reply, call.base64)
            else:
                answer = await self._on_thread(openai.encode_embeddings, reply, call.base64)
        finally:
            _let_go(reply, raw)
        self._respond(exchange, 200, [_JSON, *self._identity], answer)

    def _check_headers(self, exchange: Exchange) -> None:
        """Settle the deadline, and refuse what needs no body to be refused."""
        process, headers = self._process, exchange.headers
        is_openai = exchange.route is not None and exchange.route.envelope == "openai"
        exchange.waits = is_openai or process.settings.models.wait_for_load
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        process.check_machine_profile(headers.get("x-sie-machine-profile"))
        remote = headers.get("x-sie-remote")
        if remote is not None and remote != "forbid":
            raise BadRequest("Header 'X-SIE-Remote' must be 'forbid'")
        if process.is_draining:
            raise Unavailable("The server is stopping", code="SHUTTING_DOWN", retry_after_s=1)
        process.engine.check_open()

    async def _read(self, exchange: Exchange) -> bytes:
        body = await self._process.bodies.read(exchange.headers, exchange.protocol, exchange.deadline_ns)
        exchange.body_bytes = len(body)
        return body

    def _find(self, exchange: Exchange, model: str) -> ModelEntry:
        models = self._process.models
        entry = models.find(model)
        if entry is None:
            raise sie.model_not_found(model, models.entries)
        exchange.known_model = model
        return entry

    async def _serving(self, exchange: Exchange, entry: ModelEntry) -> ModelEntry:
        """Return a model's entry as soon as it can be served; whether one that loads is waited for is the route's."""
        models = self._process.models
        if exchange.waits:
            return await models.wait_serving(entry, exchange.deadline_ns)
        models.check_serving(entry)
        return entry

    async def _run(self, exchange: Exchange, entry: ModelEntry, request: EncodeRequest) -> tuple[EncodeReply, Reply]:
        """Return a request's rows and the reply that holds them, which the caller releases."""
        process = self._process
        entry = await self._serving(exchange, entry)
        pending, tokenization_ns = await process.encoder.start(entry, request, exchange.deadline_ns)
        process.watch_client(pending, exchange.protocol)
        raw: Reply = await pending.future
        try:
            reply = read_reply(raw, entry, request, exchange.began_ns, tokenization_ns)
        except BaseException:
            raw.release()
            raise
        exchange.timing = reply.timing
        exchange.num_items = reply.num_items
        return reply, raw

    async def _run_score(self, exchange: Exchange, entry: ModelEntry, request: ScoreRequest) -> ScoreReply:
        process = self._process
        entry = await self._serving(exchange, entry)
        pending, tokenization_ns = await process.scorer.start(entry, request, exchange.deadline_ns)
        process.watch_client(pending, exchange.protocol)
        raw: Reply = await pending.future
        try:
            reply = read_scores(raw, request, exchange.began_ns, tokenization_ns)
        finally:
            raw.release()
        exchange.timing = reply.timing
        exchange.num_items = len(request.documents)
        return reply

    @property
    def _limits(self) -> Limits:
        return self._process.settings.limits

    async def _decode(self, decode: Callable[..., Any], body: bytes, *args: Any) -> Any:
        """Decode a body, a large one on a thread."""
        if len(body) < _LARGE_BODY_BYTES:
            return decode(body, *args)
        return await self._on_thread(decode, body, *args)

    async def _on_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

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


def _let_go(reply: EncodeReply, raw: Reply) -> None:
    """Give a reply's extent back; no view of it is left."""
    reply.values, reply.sparse, reply.multivector = memoryview(b""), None, None
    raw.release()


def _timing_headers(timing: Timing) -> list[tuple[str, str]]:
    """Return the headers that say where the time went. Source: SIE API reference, section 13."""
    headers = [
        ("x-queue-time", f"{timing.queue_ms:.2f}"),
        ("x-tokenization-time", f"{timing.tokenization_ms:.2f}"),
        ("x-inference-time", f"{timing.inference_ms:.2f}"),
        ("x-total-time", f"{timing.total_ms:.2f}"),
    ]
    if timing.postprocessing_ms:
        headers.append(("x-postprocessing-time", f"{timing.postprocessing_ms:.2f}"))
    return headers


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
    return models_dialect.model_info(entry.card, entry.state, last_error, created_s)
