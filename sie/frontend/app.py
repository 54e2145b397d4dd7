"""Serves HTTP and websockets of one frontend process: the RSGI callable, dispatch, and the one error boundary.

The inference routes' handlers are in `sie.frontend.routes.embed`; whatever a handler raises becomes an error in its
dialect's own shape in `App._fail`, and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, cast

from sie.frontend import dashboard, openapi
from sie.frontend.access.gate import CHALLENGE, Access
from sie.frontend.dialects.native import negotiate
from sie.frontend.fastpath.dispatch import FastPath
from sie.frontend.fastpath.encode import EncodeFastPath
from sie.frontend.fastpath.infer import InferFastPath
from sie.frontend.http import routes
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.html import page_headers
from sie.frontend.http.intake import Intake, Scheduler
from sie.frontend.http.response import JSON, Response
from sie.frontend.http.routes import ENCODE, INFER
from sie.frontend.http.stream import STREAM_HEADERS, Streamed, send_stream
from sie.frontend.models.admin import check_admin
from sie.frontend.openapi import docs_page as docs
from sie.frontend.process import FrontendProcess
from sie.frontend.routes import error_envelopes
from sie.frontend.routes.embed import Inference
from sie.frontend.routes.kserve import KServe, TextCall
from sie.frontend.routes.model_cards import list_body, show_model
from sie.frontend.telemetry.access_log import id_headers, request_id_of
from sie.frontend.telemetry.counting import count_exchange
from sie.frontend.telemetry.metrics import CONTENT_TYPE, UNKNOWN_MODEL, render
from sie.runtime.child_setup import calm_collector
from sie.runtime.logs import get_logger
from sie.values.errors import BadRequest, ClientGone, Internal, NotFound, SieError

if TYPE_CHECKING:
    from sie.frontend.routes.generate import TextRoutes
    from sie.frontend.routes.trtis import Trtis

_log = get_logger(__name__)
_TEXT: Final = ("content-type", "text/plain; charset=utf-8")
_CLOSE: Final = ("connection", "close")
_ERROR_CODE: Final = "x-sie-error-code"
_API_VERSION: Final = "0.10.1"
"""Release of the reference server whose API this one speaks; a version of our own would have SDKs warn their users."""
_MUST_CLOSE: Final = frozenset({408, 413})
"""After these the rest of a body may still be on its way."""
_BODY_UNREAD: Final = frozenset({401, 403, 429, 503})
"""These may be known from the headers alone."""
_MAX_DISCARDED_BYTES: Final = 256 * 1024
_TEXT_DIALECTS: Final = frozenset({"text", "anthropic"})
_TENSOR_DIALECTS: Final = frozenset({"kserve", "trtis"})


class App:
    """What Granian calls. One instance per process."""

    def __init__(self, connect: Callable[[asyncio.AbstractEventLoop], FrontendProcess]) -> None:
        self._connect = connect
        self._identity = (
            ("x-sie-server-version", _API_VERSION),
            ("x-sie-served-by", "local"),
            ("x-sie-runtime-instance", secrets.token_hex(32)),
        )

    def __rsgi_init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Join the supervisor before the first connection is accepted."""
        self._process = self._connect(loop)
        self._inference = Inference(self._process, self._identity)
        self._kserve = KServe(self._process, self._inference.pool)
        submitters = {
            ENCODE: EncodeFastPath(self._process, self._inference),
            INFER: InferFastPath(self._process, self._kserve),
        }
        self._fast_path = FastPath(self, self._process, submitters)
        self._trtis: Trtis | None = None
        self._texts: TextRoutes | None = None
        calm_collector()

    def scheduler(self, loop: asyncio.AbstractEventLoop, serve: Any, **_options: Any) -> Scheduler:
        """Return what Granian's threads hand requests to, in place of Granian's own (granian 2.8, `_new_cbscheduler`)."""
        intake = Intake(loop, self._fast_path.take, serve, self._fast_path.spawn)
        return Scheduler(loop, intake.schedule)

    def __rsgi_del__(self, _loop: asyncio.AbstractEventLoop) -> None:
        """Leave, when Granian has finished every request."""
        self._process.close()

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        """Serve one request or websocket."""
        if scope.proto == "ws":
            await self._serve_websocket(scope, protocol)
            return
        await self.serve(Exchange(scope, protocol, time.monotonic_ns()))

    async def serve(self, exchange: Exchange) -> None:
        """Serve one request from its headers to its answer."""
        if exchange.route is None and (matched := routes.match(exchange.scope.path)) is not None:
            exchange.route, exchange.model = matched
        access = self._process.access
        await self.guard(
            exchange, self._dispatch(exchange) if access is None else self._dispatch_for_holder(exchange, access)
        )

    async def guard(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Do what answers a request; whatever it raises becomes the answer."""
        try:
            await work
        except Exception as error:
            self.fail(exchange, error)
            if isinstance(error, SieError) and error.http_status in _BODY_UNREAD and not exchange.body_bytes:
                await self._discard_body(exchange)

    def fail(self, exchange: Exchange, error: Exception) -> None:
        """Answer with an error; one that is no `SieError` is logged, and the client told no more than that."""
        if isinstance(error, SieError):
            self._fail(exchange, error)
        else:
            route = exchange.route
            _log.error("%s %s failed", exchange.scope.method, route.template if route else "?", exc_info=error)
            self._fail(exchange, Internal("internal error"))
        error.__traceback__ = None  # its frames hold the future that holds the error: a ring, with the request in it

    async def _discard_body(self, exchange: Exchange) -> None:
        """Take a small body after the answer: a client that is still sending it would else be reset, and never read why."""
        process = self._process
        announced = exchange.headers.get("content-length") or ""
        if announced.isdigit() and 0 < int(announced[:12]) <= _MAX_DISCARDED_BYTES:
            with contextlib.suppress(SieError):  # it may well have left by now
                await process.bodies.read(
                    exchange.headers, exchange.protocol, exchange.began_ns + process.timeout_ns(None)
                )

    async def _serve_websocket(self, scope: Any, protocol: Any) -> None:
        process = self._process
        need = routes.WEBSOCKETS.get(scope.path)
        may_go_on = None
        try:
            if process.host_check is not None:
                process.host_check.check(scope.headers)
            if process.access is not None:
                may_go_on = process.access.admit_watcher(scope.headers, scope.query_string, need or "any")
        except SieError as error:
            protocol.close(error.http_status)
            return
        if need is None:
            protocol.close(404)
            return
        await process.status.serve(protocol, may_go_on)

    async def _dispatch_for_holder(self, exchange: Exchange, access: Access) -> None:
        """Dispatch what the key in a request allows. What is no route, or not its method, needs a key as well."""
        route = exchange.route
        if exchange.scope.method == "OPTIONS" and self._is_preflight(exchange):
            return  # a browser sends no key before it has been told that it may
        if exchange.holder is None:  # the fast path has admitted some requests already
            access.admit(exchange, route.need if route is not None else "any")
        try:
            await self._dispatch(exchange)
        finally:
            if exchange.holder is not None:
                exchange.holder.end()

    def _is_preflight(self, exchange: Exchange) -> bool:
        """Answer a browser that asks whether a page of another origin may use this server; return whether it did."""
        cors = self._process.cors
        answer = cors.preflight(exchange.headers) if cors is not None else None
        if answer is None:
            return False
        self.respond(exchange, 204, answer, b"")
        return True

    async def _dispatch(self, exchange: Exchange) -> None:
        if self._process.host_check is not None:
            self._process.host_check.check(exchange.headers)
        route = exchange.route
        method = exchange.scope.method
        if route is None or (method != route.method and method != route.also):  # noqa: PLR1714  # a tuple for each request
            route = routes.BY_METHOD.get((route.template, method)) if route is not None else None
            if route is None:
                self._answer_mismatch(exchange, exchange.route)
                await self._discard_body(exchange)
                return
            exchange.route = route
        if not route.endpoint:
            await self._handle(exchange, route)
            return
        headers, body = await getattr(self._inference, route.handler)(exchange)
        self.respond(exchange, 200, headers, body)

    async def _handle(self, exchange: Exchange, route: routes.Route) -> None:
        """Serve a route that is none of the inference routes of `sie.frontend.routes.embed`."""
        if route.envelope in _TEXT_DIALECTS:
            await self._serve_text(exchange, route.handler)
            return
        if route.envelope not in _TENSOR_DIALECTS:
            await getattr(self, f"_{route.handler}")(exchange)
            return
        if route.need == "admin":
            self._check_admin(exchange, has_body=False)
        dialect = self._kserve if route.envelope == "kserve" else await self._open_trtis()
        answer: Response | TextCall = await getattr(dialect, route.handler)(exchange)
        if isinstance(answer, TextCall):
            await self._serve_text(exchange, "generate_tensor", answer)
        else:
            self.respond(exchange, *answer)

    async def _open_trtis(self) -> Trtis:
        """Return the handlers of the v1 API; the first use imports protobuf, on a thread."""
        if self._trtis is None:
            pool = self._inference.pool
            module = await asyncio.get_running_loop().run_in_executor(
                pool, importlib.import_module, "sie.frontend.routes.trtis"
            )
            self._trtis = cast("Trtis", module.Trtis(self._process, self._kserve, pool))
        return self._trtis

    async def _generate(self, exchange: Exchange) -> None:
        await self._serve_text(exchange, "generate")

    async def _serve_text(self, exchange: Exchange, handler: str, *args: Any) -> None:
        """Serve a route that generates text: answered at once, or as a stream that is counted when it ends.

        handler names a method of `TextRoutes`, which takes args behind the exchange.
        """
        process = self._process
        if self._texts is None:
            module = await asyncio.get_running_loop().run_in_executor(
                self._inference.pool, importlib.import_module, "sie.frontend.routes.generate"
            )
            self._texts = cast("TextRoutes", module.TextRoutes(process, self._inference.pool))
        exchange.request_id = request_id_of(exchange.headers)
        try:
            answer = await getattr(self._texts, handler)(exchange, *args)
            if isinstance(answer, Streamed):
                await self._stream(exchange, answer)
            else:
                headers, body = answer
                self.respond(exchange, 200, [*headers, *self._text_headers(exchange)], body)
        finally:
            self._texts.service.leave(exchange)

    def _text_headers(self, exchange: Exchange) -> list[tuple[str, str]]:
        """Return what an answer's headers say of the answer; of the server they do so on the SIE route alone."""
        is_native = exchange.route is not None and exchange.route.envelope == "sie"
        return [*id_headers(exchange), *(self._identity if is_native else ())]

    async def _stream(self, exchange: Exchange, answer: Streamed) -> None:
        """Send an answer as it comes. It is recorded and counted when it ends."""
        process = self._process
        headers = [*STREAM_HEADERS, *self._text_headers(exchange)]
        for part in (process.access, process.cors):  # the other recorders write down what has ended
            headers = part.record(exchange, 200, headers, None) if part is not None else headers

        def begin() -> Any:
            return exchange.protocol.response_stream(200, headers)

        error = await send_stream(answer, begin, exchange.scope.client, process.settings.generation)
        exchange.timing = answer.run.timing(exchange.began_ns)
        for record in process.recorders:
            record(exchange, 200, [], error)
        count_exchange(process.metrics, exchange, 200, error)

    def _answer_mismatch(self, exchange: Exchange, route: routes.Route | None) -> None:
        """Answer a request for a path that is no route, or with a method that is not its route's."""
        scope = exchange.scope
        target = routes.redirect_of(scope.path) if route is None and scope.method == "POST" else None
        if scope.method == "OPTIONS" and self._is_preflight(exchange):
            return
        if target is not None:
            self._answer(exchange, 307, [("location", target)], b"")
        elif route is None or self._kserve.is_unknown_path(exchange, route):
            self._answer(exchange, *error_envelopes.unknown_path(scope.path))
        else:
            self._answer(exchange, *error_envelopes.wrong_method(route))

    # --- everything else ------------------------------------------------------------------------------------------

    async def _list_models(self, exchange: Exchange) -> None:
        self._answer(exchange, 200, [JSON], list_body(self._process.models))

    async def _show_model(self, exchange: Exchange) -> None:
        status, body = show_model(self._process.models, exchange.model)
        self._answer(exchange, status, [JSON] if status == 200 else [JSON, (_ERROR_CODE, NotFound.code)], body)

    async def _manage_model(self, exchange: Exchange) -> None:
        process, headers = self._process, exchange.headers
        self._check_admin(exchange, has_body=True)
        exchange.deadline_ns = exchange.began_ns + process.timeout_ns(headers.get("x-sie-timeout-ms"))
        body = await exchange.read_body(process.bodies)
        verb = exchange.scope.path.rpartition("/")[2]
        exchange.known_model = UNKNOWN_MODEL
        answer = await process.admin.serve(verb, body, exchange.deadline_ns)
        exchange.known_model = answer.model or UNKNOWN_MODEL
        self._answer(exchange, answer.http_status, [JSON], answer.body)

    async def _show_admin(self, exchange: Exchange) -> None:
        """Tell a page whether its buttons would work."""
        self._check_admin(exchange, has_body=False)
        self._answer(exchange, 200, [JSON], b'{"allowed":true}')

    def _check_admin(self, exchange: Exchange, *, has_body: bool) -> None:
        """Raise Forbidden for whom `admin_from` does not mean; a key with the scope admin stands for loopback."""
        settings = self._process.settings
        admin_from = settings.server.admin_from
        if self._process.access is None or admin_from == "nobody":
            client = "localhost" if settings.access.uds else exchange.scope.client  # a Unix socket ends on this host
            check_admin(admin_from, client, exchange.headers, has_body=has_body)

    async def _make_ticket(self, exchange: Exchange) -> None:
        """Give a page what opens its websocket: a browser can set no header there."""
        access = self._process.access
        ticket = access.make_ticket(exchange.holder) if access is not None else ""
        self._answer(exchange, 200, [JSON, ("cache-control", "no-store")], b'{"ticket":"%b"}' % ticket.encode())

    async def _healthz(self, exchange: Exchange) -> None:
        self._answer(exchange, 200, [_TEXT], b"ok")

    async def _readyz(self, exchange: Exchange) -> None:
        if self._process.is_ready:
            self._answer(exchange, 200, [_TEXT], b"ok")
        else:
            self._answer(exchange, 503, [_TEXT], b"not ready")

    async def _health(self, exchange: Exchange) -> None:
        if negotiate.JSON in (exchange.headers.get("accept") or ""):
            # What sie-sdk asks to tell a cluster's gateway from a server; it reads whatever comes as JSON.
            self._answer(exchange, 200, [JSON], b'{"status":"ok","type":"worker"}')
        else:
            self._answer(exchange, 200, [_TEXT], b"OK")

    async def _metrics(self, exchange: Exchange) -> None:
        self._answer(exchange, 200, [("content-type", CONTENT_TYPE)], render(self._process.pages))

    async def _openapi(self, exchange: Exchange) -> None:
        self._answer(exchange, 200, [JSON], openapi.document_json(self._process.settings.limits))

    async def _docs(self, exchange: Exchange) -> None:
        page = docs.page(self._process.settings.limits)
        self._answer(exchange, 200, page_headers(page), page)

    async def _home(self, exchange: Exchange) -> None:
        if "text/html" in (exchange.headers.get("accept") or ""):
            self._answer(exchange, 200, dashboard.headers(), dashboard.page())
        else:
            self._answer(exchange, 200, [_TEXT], b"OK")

    def _answer(self, exchange: Exchange, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Respond with the request's id."""
        self.respond(exchange, status, [*headers, *id_headers(exchange)], body)

    # --- error boundary -------------------------------------------------------------------------------------------

    def _fail(self, exchange: Exchange, error: SieError) -> None:
        """Answer with an error in the shape of the route's dialect."""
        envelope = exchange.route.envelope if exchange.route is not None else "sie"
        if isinstance(error, ClientGone):
            # To nobody mostly, but Granian would complain of an answer that never came, and a client that closed only
            # its own direction, in the middle of its body, reads it.
            _, headers, body = error_envelopes.failure(envelope, BadRequest(error.message))
            exchange.protocol.response_bytes(400, [*headers, _CLOSE], body)
            for record in self._process.recorders:
                record(exchange, error.http_status, [], error)
            count_exchange(self._process.metrics, exchange, error.http_status, error)
            return
        status, headers, body = error_envelopes.failure(envelope, error)
        if envelope not in _TENSOR_DIALECTS:
            if (
                envelope != "sie"
            ):  # SIE's clients read OpenAI's `error` before our `detail`, and this header before both
                headers = [*headers, (_ERROR_CODE, error.code)]
            headers = [*headers, *self._identity, *id_headers(exchange)]
        if error.http_status == 401:
            headers.append(CHALLENGE)
        if error.retry_after_s is not None:
            headers.append(("retry-after", str(error.retry_after_s)))
        if error.http_status in _MUST_CLOSE:
            headers.append(_CLOSE)
        self.respond(exchange, status, headers, body, error)

    def respond(
        self,
        exchange: Exchange,
        status: int,
        headers: list[tuple[str, str]],
        body: bytes,
        error: SieError | None = None,
    ) -> None:
        """Send an answer that is whole, and count it."""
        process = self._process
        if process.closes_connections and _CLOSE not in headers:
            headers = [*headers, _CLOSE]
        for record in process.recorders:
            headers = record(exchange, status, headers, error)
        exchange.protocol.response_bytes(status, headers, body)
        count_exchange(process.metrics, exchange, status, error)
