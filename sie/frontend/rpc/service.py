"""Serves gRPC of one process: the generic handlers, who may ask, the one error border, and what is counted.

Messages come and go as bytes. Whatever a handler raises becomes a status code in `Service.answer`, and nowhere else; a
dialect that tells failures in its replies has turned them into replies before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, Protocol, cast

import grpc
import grpc.aio

from sie.errors import BadRequest, ClientGone, Internal, SieError
from sie.frontend.admin import check_admin
from sie.frontend.counting import count_exchange
from sie.frontend.dialects.protobuf_wire import parse
from sie.frontend.inference import Exchange
from sie.frontend.links import Pending
from sie.frontend.process import FrontendProcess
from sie.frontend.rpc.codes import details, status_code
from sie.frontend.rpc.methods import Method
from sie.frontend.rpc.streams import Streams
from sie.logs import get_logger
from sie.proto import message_class

_log = get_logger(__name__)
_MAX_HEADERS: Final = 256

Context = grpc.aio.ServicerContext[bytes, bytes]


class Scope:
    """What a request is about, in the words of HTTP."""

    __slots__ = ("_context", "headers", "path")
    method = "POST"
    proto = "grpc"

    def __init__(self, path: str, headers: dict[str, str], context: Context) -> None:
        self.path = path
        self.headers = headers
        self._context = context

    @property
    def client(self) -> str:
        """Who asks, `address:port`; few requests want to know."""
        return _client(self._context.peer())


class Dialect(Protocol):
    """What has the handlers of one service. A streaming method's turns one message into one reply, failures too."""

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> bytes | None:
        """Return a reply that tells of a failure, or None where the call's status is to do so."""
        ...


class Service:
    """The methods of one process."""

    def __init__(self, process: FrontendProcess, dialects: dict[str, Dialect]) -> None:
        """Dialects are by the name of their service."""
        self._process = process
        self._dialects = dialects
        self._streams = Streams()

    def handlers(self, methods: Iterable[Method]) -> list[grpc.GenericRpcHandler]:
        """Return what a gRPC server is told to serve."""
        by_service: dict[str, dict[str, Any]] = {}
        for method in methods:
            if method.is_stream:
                serve, make = self._streaming(method), grpc.stream_stream_rpc_method_handler
            elif method.is_watch:
                serve, make = self._watching(method), grpc.unary_stream_rpc_method_handler
            else:
                serve, make = self._answering(method), grpc.unary_unary_rpc_method_handler
            handler = cast("Any", make)(serve)
            by_service.setdefault(method.service, {})[method.name] = handler
        return [grpc.method_handlers_generic_handler(name, found) for name, found in by_service.items()]

    def end_streams(self) -> None:
        """Let every stream end once what it was asked is answered."""
        self._streams.end()

    # --- calls ----------------------------------------------------------------------------------------------------

    # Each a function of its own: gRPC asks at every call whether it is a coroutine's, and unwraps any other callable.

    def _answering(self, method: Method) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(message: bytes, context: Context) -> bytes:
            try:
                return await self._serve(method, self._exchange(method, message, context), message)
            except SieError as error:
                failure = error
            await context.abort(status_code(failure), details(failure))
            raise AssertionError("abort raises")

        return answer

    def _watching(self, method: Method) -> Callable[[bytes, Context], Awaitable[None]]:
        answer = self._answering(method)

        async def watch(message: bytes, context: Context) -> None:
            await context.write(await answer(message, context))

        return watch

    def _streaming(self, method: Method) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
        async def stream(messages: AsyncIterator[bytes], context: Context) -> None:
            async def answer(message: bytes) -> bytes:
                return await self._serve(method, self._exchange(method, message, context), message)

            try:
                await self._streams.run(messages, answer, context.write)
            except SieError as error:
                failure = error
            else:
                return
            await context.abort(status_code(failure), details(failure))

        return stream

    def _exchange(self, method: Method, message: bytes, context: Context) -> Exchange:
        headers = _headers(context.invocation_metadata() or ())
        exchange = Exchange(Scope(method.route.template, headers, context), context, time.monotonic_ns())
        exchange.route = method.route
        exchange.body_bytes = len(message)
        return exchange

    async def _serve(self, method: Method, exchange: Exchange, message: bytes) -> bytes:
        """Return the reply to one message. Raises SieError where it is for the call's status to tell what is wrong."""
        failure: SieError | None = None
        try:
            self._enter(exchange)
            try:
                return await self._handle(method, exchange, message)
            except SieError as error:
                failure = error
                reply = self._dialects[method.service].fail(exchange, message, error, is_stream=method.is_stream)
                if reply is None:
                    raise
                return reply
            finally:
                if exchange.holder is not None:
                    exchange.holder.end()
        except SieError as error:
            failure = error
            raise
        except asyncio.CancelledError:
            failure = ClientGone("the client left before its answer was there")
            raise
        except Exception:
            _log.exception("%s failed", method.route.template)
            failure = Internal("internal error")
            raise failure from None
        finally:
            self._end(exchange, failure, is_stream=method.is_stream)

    def _enter(self, exchange: Exchange) -> None:
        """Let in whom the keys and `admin_from` let in. Raises Unauthorized, Forbidden or RateLimited."""
        process, route = self._process, exchange.route
        assert route is not None
        process_access = process.access
        if process_access is not None:
            holder = process_access.identify(exchange.headers, route.need)
            if holder is not None:
                process_access.begin(holder)
                exchange.holder = holder
        admin_from = process.settings.server.admin_from
        if route.need == "admin" and (process_access is None or admin_from == "nobody"):
            client = exchange.scope.client
            # No page of a browser speaks gRPC, so that the address alone says who asks.
            check_admin(admin_from, client, {**exchange.headers, "host": client}, has_body=False)

    async def _handle(self, method: Method, exchange: Exchange, message: bytes) -> bytes:
        exchange.deadline_ns = self._deadline_ns(exchange)
        handler: Callable[[Exchange, Any], Awaitable[bytes]] = getattr(
            self._dialects[method.service], method.route.handler
        )
        if not method.request:
            return await handler(exchange, message)
        return await handler(exchange, parse(message_class(method.file, method.request), message))

    def _deadline_ns(self, exchange: Exchange) -> int:
        """Return when the client or the server stops to wait, whichever is first."""
        timeout_ns = self._process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        left_s = exchange.protocol.time_remaining()
        if left_s is not None and left_s * 1e9 < timeout_ns:
            timeout_ns = int(left_s * 1e9)
        return exchange.began_ns + timeout_ns

    # --- figures --------------------------------------------------------------------------------------------------

    def _end(self, exchange: Exchange, error: SieError | None, *, is_stream: bool) -> None:
        process = self._process
        status = 200 if error is None else error.http_status
        headers: list[tuple[str, str]] = []
        for record in process.recorders:
            headers = record(exchange, status, headers, error)
        if headers and not is_stream:  # of a stream's many requests each would have its own
            exchange.protocol.set_trailing_metadata(headers)
        count_exchange(process.metrics, exchange, status, error)


class Watched:
    """The work of one request: given up when its call is cancelled, as it is when the client leaves."""

    def __init__(self, process: FrontendProcess) -> None:
        self._process = process
        self._work: list[Pending] = []

    def watch(self, pending: Pending) -> None:
        """Take note of work that was handed to a worker."""
        self._work.append(pending)

    def give_up(self) -> None:
        """Tell the worker not to run it."""
        for pending in self._work:
            self._process.engine.abandon(pending, ClientGone("the client left before its answer was there"))


def _headers(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Return a call's metadata, the first of each name; what is binary is not ours."""
    found: dict[str, str] = {}
    for number, (name, value) in enumerate(metadata):
        if number >= _MAX_HEADERS:
            raise BadRequest(f"the call has more than {_MAX_HEADERS} entries of metadata")
        if isinstance(value, str):
            found.setdefault(name, value)
    return found


def _client(peer: str) -> str:
    """Return `address:port` of gRPC's `ipv4:address:port` or `ipv6:%5Baddress%5D:port`."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")
