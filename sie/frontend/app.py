"""Serves HTTP and websockets of one frontend process: the RSGI callable, dispatch, and the one error boundary.

`sie.frontend.routes.table` names the handler of each route. Only `App._fail` turns an exception of a handler into an
error in the shape of its dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from sie.frontend.access.gate import CHALLENGE, Access
from sie.frontend.dialects.native.dialect import ENCODE
from sie.frontend.fastpath.dispatch import FastPath, TrySubmit
from sie.frontend.fastpath.encode import EncodeFastPath
from sie.frontend.fastpath.infer import InferFastPath
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.intake import Intake, Scheduler
from sie.frontend.http.near_routes import hint_for, is_tensorflow_serving
from sie.frontend.http.response import FileResponse, Response
from sie.frontend.http.routing import Route, Row
from sie.frontend.http.stream import STREAM_HEADERS, Streamed, send_stream
from sie.frontend.http.unread import MIN_BYTES
from sie.frontend.models.admin import check_admin
from sie.frontend.process import FrontendProcess
from sie.frontend.routes import error_envelopes
from sie.frontend.routes.handlers import Handlers
from sie.frontend.routes.models import ERROR_CODE
from sie.frontend.routes.table import CLUSTER_STATUS, INFER, TABLE, WEBSOCKETS, Handler, find_route, is_unknown_action
from sie.frontend.telemetry.access_log import id_headers
from sie.frontend.telemetry.counting import count_exchange
from sie.runtime.child_setup import calm_collector
from sie.runtime.ends_of_work import ENDS_OF_WORK
from sie.runtime.logs import get_logger
from sie.values.errors import BadRequest, ClientGone, Internal, SieError

_log = get_logger(__name__)
_CLOSE: Final = ("connection", "close")
_API_VERSION: Final = "0.10.1"
"""Release of the reference server whose API this server implements. SDKs would warn about any other version."""
_MUST_CLOSE: Final = frozenset({408, 413})
"""After these statuses the rest of a body may still arrive."""
_BODY_UNREAD: Final = frozenset({401, 403, 429, 503})
"""These statuses may be sent after the headers, before the body is read."""
_MAX_DISCARDED_BYTES: Final = 256 * 1024


class App:
    """The RSGI application that Granian calls. One instance per process."""

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
        handlers = self._handlers = Handlers(self._process, self._identity, TABLE)
        self._handler_of: dict[Route, Handler] = {}
        submitters: dict[Route, TrySubmit] = {}
        remote, has_keys = self._process.remote, self._process.access is not None
        if remote is None or not has_keys:  # a gateway waits for a lease of a key's limits, in a task
            submitters[ENCODE] = EncodeFastPath(self._process, handlers.inference)
        if remote is None:
            submitters[INFER] = InferFastPath(self._process, handlers.kserve)
        self._fast_path = FastPath(self, self._process, submitters)
        calm_collector()

    def scheduler(self, loop: asyncio.AbstractEventLoop, serve: Any, **_options: Any) -> Scheduler:
        """Return the replacement for Granian's own scheduler of incoming requests (granian 2.8, `_new_cbscheduler`)."""
        path = self._fast_path
        intake = Intake(
            loop, path.take if self._process.remote is None else path.take_in_own_context, serve, path.spawn
        )
        return Scheduler(loop, intake.schedule)

    def __rsgi_del__(self, _loop: asyncio.AbstractEventLoop) -> None:
        """Close the process after Granian has finished every request."""
        self._process.close()

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        """Serve one request or websocket."""
        if scope.proto == "ws":
            await self._serve_websocket(scope, protocol)
            return
        await self.serve(Exchange(scope, protocol, time.monotonic_ns()))

    async def serve(self, exchange: Exchange) -> None:
        """Serve one request from its headers to its answer."""
        if exchange.route is None:
            matched = find_route(exchange.scope.path, self._process.tensors.table)
            if matched is not None:
                exchange.route, exchange.model, exchange.version = matched
        access = self._process.access
        try:
            await self.guard(
                exchange, self._dispatch(exchange) if access is None else self._dispatch_for_holder(exchange, access)
            )
        finally:
            exchange.release_body(self._process.bodies)

    async def guard(self, exchange: Exchange, work: Awaitable[None]) -> None:
        """Await the work that answers a request, and answer with the error if it raises."""
        try:
            await work
        except ENDS_OF_WORK:
            raise
        except BaseException as error:
            self.fail(exchange, error)
            if isinstance(error, SieError) and error.http_status in _BODY_UNREAD and not exchange.body_bytes:
                await self._discard_body(exchange)

    def fail(self, exchange: Exchange, error: BaseException) -> None:
        """Answer with an error. Any other than a `SieError` is logged, and the client gets only `internal error`."""
        if isinstance(error, SieError):
            self._fail(exchange, error)
        else:
            route = exchange.route
            _log.error("%s %s failed", exchange.scope.method, route.template if route else "?", exc_info=error)
            self._fail(exchange, Internal("internal error"))
        error.__traceback__ = None  # its frames hold the future that holds it: a reference cycle with the request

    async def _discard_body(self, exchange: Exchange) -> None:
        """Read a small body after the answer: else a client that still sends is reset and never reads the answer."""
        process = self._process
        announced = exchange.headers.get("content-length") or ""
        if announced.isdigit() and 0 < int(announced[:12]) <= _MAX_DISCARDED_BYTES:
            with contextlib.suppress(SieError):  # the client may have left
                await process.bodies.read(
                    exchange.headers, exchange.protocol, exchange.began_ns + process.timeout_ns(None)
                )

    async def _serve_websocket(self, scope: Any, protocol: Any) -> None:
        process = self._process
        of_cluster = process.status.cluster_hub if scope.path == CLUSTER_STATUS else None
        need = "metrics" if of_cluster is not None else WEBSOCKETS.get(scope.path)
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
        await (of_cluster or process.status.hub).serve(protocol, may_go_on)

    async def _dispatch_for_holder(self, exchange: Exchange, access: Access) -> None:
        """Dispatch a request if its key allows it. Unknown paths and wrong methods need a key, too."""
        route, method = exchange.route, exchange.scope.method
        if method == "OPTIONS" and self._is_preflight(exchange):
            return  # a browser sends its key only after the preflight
        if exchange.holder is None:  # the fast path has admitted some requests already
            # The rows of one path may need different scopes: to list pools is not to create one.
            row = TABLE.find(route.template, method) or route if route is not None else None
            need = row.need if row is not None else "any"
            if self._process.remote is not None:
                await self._process.remote.lease(access.identify(exchange.headers, need))
            access.admit(exchange, need)
        try:
            await self._dispatch(exchange)
        finally:
            if exchange.holder is not None:
                exchange.holder.end()

    def _is_preflight(self, exchange: Exchange) -> bool:
        """Answer a CORS preflight of an allowed origin. Return whether the request was one."""
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
            route = TABLE.find(route.template, method) if route is not None else None
            if route is None:
                self._answer_mismatch(exchange, exchange.route)
                await self._discard_body(exchange)
                return
            exchange.route = route
        if self._process.remote is not None:
            self._process.remote.check_route(route)
        if route.need == "admin":
            self._check_admin(exchange, route)
        handler = self._handler_of.get(route) or await self._find_handler(route)
        try:
            answer = await handler(exchange)
            if isinstance(answer, Response):
                self.respond(exchange, *answer)
            elif isinstance(answer, FileResponse):
                self._send_file(exchange, answer)
            else:
                await self._stream(exchange, answer)
        finally:
            if exchange.leave is not None:
                exchange.leave()

    async def _find_handler(self, route: Route) -> Handler:
        """Return the handler of a route at its first request, and cache it."""
        assert isinstance(route, Row)
        if route.imports:
            pool = self._handlers.inference.pool
            await asyncio.get_running_loop().run_in_executor(pool, importlib.import_module, route.imports)
        handler = self._handler_of[route] = route.handler(self._handlers)
        return handler

    def _send_file(self, exchange: Exchange, answer: FileResponse) -> None:
        """Have Granian send a file: it reads on only when the client does, so nothing has to be counted as unread."""
        process = self._process
        headers = answer.headers
        for record in process.recorders:
            headers = record(exchange, 200, headers, None)
        exchange.protocol.response_file(200, headers, answer.path)
        count_exchange(process.metrics, exchange, 200, None)

    async def _stream(self, exchange: Exchange, answer: Streamed) -> None:
        """Send a streamed answer. It is recorded and counted when it ends."""
        process = self._process
        headers = [*STREAM_HEADERS, *answer.headers]
        for part in (process.access, process.cors):  # the other recorders need the end of the request
            headers = part.record(exchange, 200, headers, None) if part is not None else headers

        def begin() -> Any:
            return exchange.protocol.response_stream(200, headers)

        settings = process.settings.generation
        unread = process.unread.open_stream(exchange.scope.client, settings.stream_backlog_bytes)
        try:
            error = await send_stream(answer, begin, unread, settings.keep_alive_interval_ms / 1e3)
        except BaseException:
            unread.end()
            raise
        finally:
            exchange.record_run(answer.run)
        for record in process.recorders:
            record(exchange, 200, [], error)
        count_exchange(process.metrics, exchange, 200, error)
        process.unread.keep(exchange, unread)

    def _answer_mismatch(self, exchange: Exchange, route: Route | None) -> None:
        """Answer a request with an unknown path, or with a method that its route does not have."""
        scope = exchange.scope
        target = TABLE.redirect_of(scope.path) if route is None and scope.method == "POST" else None
        if scope.method == "OPTIONS" and self._is_preflight(exchange):
            return
        if target is not None:
            self._answer(exchange, 307, [("location", target)], b"")
        elif (
            route is None
            or is_unknown_action(route, exchange.model, self._process.tensors.table)
            or is_tensorflow_serving(scope.path)
        ):
            self._answer(exchange, *error_envelopes.unknown_path(scope.path, hint_for(scope.path, TABLE)))
        else:
            self._answer(exchange, *error_envelopes.wrong_method(route, TABLE.methods_of(route)))

    def _check_admin(self, exchange: Exchange, route: Route) -> None:
        """Raise Forbidden for a client that `admin_from` excludes. A key with the scope admin replaces loopback.

        KServe's clients send their JSON without a Content-Type, so it is checked on SIE's routes alone.
        """
        settings = self._process.settings
        admin_from = settings.server.admin_from
        if self._process.access is None or admin_from == "nobody":
            # The clients of a Unix socket are on this host.
            client = "localhost" if settings.access.uds else exchange.scope.client
            has_body = route.envelope == "sie" and route.method == "POST" and exchange.has_body
            check_admin(admin_from, client, exchange.headers, has_body=has_body)

    def _answer(self, exchange: Exchange, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Respond with the request's id."""
        self.respond(exchange, status, [*headers, *id_headers(exchange)], body)

    # --- error boundary -------------------------------------------------------------------------------------------

    def _fail(self, exchange: Exchange, error: SieError) -> None:
        """Answer with an error in the shape of the route's dialect."""
        envelope = exchange.route.envelope if exchange.route is not None else "sie"
        if isinstance(error, ClientGone):
            # Usually nobody reads this response. But Granian logs a missing one, and a client that closed only its
            # sending direction, in the middle of its body, reads it.
            _, headers, body = error_envelopes.failure(envelope, BadRequest(error.message))
            exchange.protocol.response_bytes(400, [*headers, _CLOSE], body)
            for record in self._process.recorders:
                record(exchange, error.http_status, [], error)
            count_exchange(self._process.metrics, exchange, error.http_status, error)
            return
        status, headers, body = error_envelopes.failure(envelope, error)
        if error_envelopes.has_ids(envelope):
            if envelope != "sie":  # SIE's clients prefer this header to OpenAI's `error`, and both to our `detail`
                headers = [*headers, (ERROR_CODE, error.code)]
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
        """Send a complete answer, and count it."""
        process = self._process
        if exchange.cuts and error is None:
            headers = [*headers, exchange.cut_header()]
        if process.closes_connections and _CLOSE not in headers:
            headers = [*headers, _CLOSE]
        for record in process.recorders:
            headers = record(exchange, status, headers, error)
        exchange.protocol.response_bytes(status, headers, body)
        count_exchange(process.metrics, exchange, status, error)
        if len(body) >= MIN_BYTES:
            process.unread.add(exchange, len(body), is_error=error is not None)
