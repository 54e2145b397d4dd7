"""Serves the gRPC methods of one process: access, dispatch, counting and the only error boundary. Handles bytes only.

Only `Service` turns an error of a handler into a status code. A dialect that reports failures in its replies turns them
into replies first.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

from sie.config.settings import Settings
from sie.frontend.access.key_use import KeyHolder
from sie.frontend.dialects.kserve.protobuf_wire import parse
from sie.frontend.grpc.methods import BY_PATH, Method
from sie.frontend.grpc.streams import Streams
from sie.frontend.grpc.transport.calls import Call
from sie.frontend.grpc.transport.message_framing import Message
from sie.frontend.grpc.transport.status_codes import details, status_code
from sie.frontend.http.compression import decompress
from sie.frontend.http.exchange import Exchange
from sie.frontend.http.threads import LARGE_BYTES, offload
from sie.frontend.models.admin import check_admin
from sie.frontend.process import FrontendProcess
from sie.frontend.telemetry.counting import count_exchange
from sie.proto import message_class
from sie.runtime.ends_of_work import ENDS_OF_WORK
from sie.runtime.logs import get_logger
from sie.values.errors import BadRequest, ClientGone, InputTooLong, Internal, SieError

_log = get_logger(__name__)
_MAX_PARSED_BYTES: Final = 64 * 1024
_DECOMPRESSED_TIMES: Final = 16
"""Assumed growth of a compressed message, for the choice whether a thread decompresses it."""


class Dialect(Protocol):
    """The handlers of one service. The handler of a streaming method turns each message into one reply, also on failure."""

    def fail(self, exchange: Exchange, message: bytes, error: SieError, *, is_stream: bool) -> bytes | None:
        """Return a reply that reports the failure, or None if the call's status must report it."""
        ...


class Service:
    """The methods of one process."""

    def __init__(self, process: FrontendProcess, dialects: dict[str, Dialect]) -> None:
        """Connect methods to handlers. dialects is keyed by service name."""
        self._process = process
        self._dialects = dialects
        self._streams = Streams()

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self._process.settings

    def find(self, path: str) -> Method | None:
        """Return the method that a path names, or None."""
        return BY_PATH.get(path)

    def begin(self, call: Call, message: Message) -> None:
        """Start to answer a call with one message."""
        call.start((self._watch if _method(call).is_watch else self._answer)(call, message))

    def begin_stream(self, call: Call) -> None:
        """Start to answer a call with a stream of messages."""
        call.start(self._stream(call))

    def end_streams(self) -> None:
        """End every stream after its received requests are answered."""
        self._streams.end()

    # --- calls ----------------------------------------------------------------------------------------------------

    async def _answer(self, call: Call, message: Message) -> None:
        keys: list[KeyHolder] = []
        try:
            data = await self._decompressed(call, message) if message.is_compressed else message.data
            call.answer(await self._serve(call, data, keys))
            if keys and call.unsent is not None:  # the request of its key ends when its answer has left
                await call.unsent.wait()
        except Exception as error:
            _fail(call, error)
        finally:
            _end_requests(keys)

    async def _watch(self, call: Call, message: Message) -> None:
        try:
            data = await self._decompressed(call, message) if message.is_compressed else message.data
            await call.write(await self._serve(call, data))
            call.finish()
        except Exception as error:
            _fail(call, error)

    async def _stream(self, call: Call) -> None:
        async def messages() -> AsyncIterator[bytes]:
            async for message in call.messages():
                yield await self._decompressed(call, message) if message.is_compressed else message.data

        unread = _UnreadReplies()
        try:
            await self._streams.run(
                messages(),
                unread.keeping_keys(functools.partial(self._serve, call)),
                unread.ending_requests(call.write),
            )
            call.finish()
        except Exception as error:
            _fail(call, error)
        finally:
            unread.close()

    async def _decompressed(self, call: Call, message: Message) -> bytes:
        """Decompress a message. Raises SieError."""
        coding, limits = call.head.coding, self._process.settings.limits
        if coding == "identity":
            raise Internal("the message is marked as compressed, but the call has no grpc-encoding")
        max_bytes, max_ratio = limits.max_grpc_message_bytes, limits.max_compression_ratio
        size = len(message.data) * _DECOMPRESSED_TIMES
        try:
            return await offload(
                self._process.decode_pool, size, decompress, message.data, coding, max_bytes, max_ratio
            )
        except InputTooLong:
            text = "the message is too large when decompressed (max_grpc_message_bytes, max_compression_ratio)"
            raise SieError(text, code="MESSAGE_TOO_LARGE", http_status=413) from None

    async def _serve(self, call: Call, message: bytes, keys: list[KeyHolder] | None = None) -> bytes:
        """Return the reply to one message. Raises SieError if the call's status must report the failure.

        keys gets the API key whose request the caller has to end; without it, the request ends here.
        """
        method = _method(call)
        dialect = self._dialects[method.service]
        exchange = _exchange_of(call, method, message)
        failure: SieError | None = None
        num_held = len(message) if len(message) >= LARGE_BYTES else 0
        try:
            call.hold(num_held)
            self._enter(exchange)
            try:
                exchange.deadline_ns = self._deadline_ns(exchange)
                return await method.handler(dialect, exchange, _asked(method, message))
            except SieError as error:
                failure = error
                reply = dialect.fail(exchange, message, error, is_stream=method.is_stream)
                if reply is None:
                    raise
                return reply
            finally:
                _leave_key(exchange, keys)
        except SieError as error:
            failure = error
            raise
        except asyncio.CancelledError:
            failure = ClientGone("the client left before its answer was there")
            raise
        except ENDS_OF_WORK:
            raise
        except BaseException:
            _log.exception("%s failed", method.route.template)
            failure = Internal("internal error")
            raise failure from None
        finally:
            call.hold(-num_held)
            self._end(exchange, failure, is_stream=method.is_stream)
            failure = None  # its traceback refers to this frame, and so to the message

    def _enter(self, exchange: Exchange) -> None:
        """Check the host, the API key and `admin_from`. Raises Unauthorized, Forbidden or RateLimited."""
        process, route = self._process, exchange.route
        if process.host_check is not None:
            process.host_check.check(exchange.headers)
        assert route is not None
        process_access = process.access
        holder = process_access.identify(exchange.headers, route.need) if process_access is not None else None
        admin_from = process.settings.server.admin_from
        if route.need == "admin" and (process_access is None or admin_from == "nobody"):
            client = exchange.scope.client
            # A browser's page cannot speak gRPC, so the address alone identifies the client.
            check_admin(admin_from, client, {**exchange.headers, "host": client}, has_body=False)
        if process_access is not None and holder is not None:
            process_access.begin(holder)  # ORDER: last, because nothing ends the request of a key that is refused here
            exchange.holder = holder

    def _deadline_ns(self, exchange: Exchange) -> int:
        """Return the earlier deadline of client and server."""
        deadline_ns = exchange.began_ns + self._process.timeout_ns(exchange.headers.get("x-sie-timeout-ms"))
        asked_ns: int = exchange.protocol.deadline_ns
        return min(deadline_ns, asked_ns) if asked_ns else deadline_ns

    # --- counting -------------------------------------------------------------------------------------------------

    def _end(self, exchange: Exchange, error: SieError | None, *, is_stream: bool) -> None:
        process = self._process
        status = 200 if error is None else error.http_status
        headers = [exchange.cut_header()] if exchange.cuts and error is None else []
        for record in process.recorders:
            headers = record(exchange, status, headers, error)
        if headers and not is_stream:  # a stream has many requests, but only one set of trailers
            exchange.protocol.set_trailing_metadata(headers)
        count_exchange(process.metrics, exchange, status, error)


class _UnreadReplies:
    """The requests of one stream for their keys: each ends when its reply has left, or when the stream ends."""

    def __init__(self) -> None:
        self._keys: deque[list[KeyHolder]] = deque()
        """For each message without a written reply, in order: its key, or nothing before it is identified."""
        self._is_over = False

    def keeping_keys(self, serve: Callable[[bytes, list[KeyHolder]], Awaitable[bytes]]) -> Callable[[bytes], Any]:
        """Return a function that serves a message and keeps its key. Call that function in the order of the messages."""

        async def answer(message: bytes) -> bytes:
            keys: list[KeyHolder] = []
            self._keys.append(keys)
            try:
                return await serve(message, keys)
            finally:
                if self._is_over:
                    _end_requests(keys)

        return answer

    def ending_requests(self, write: Callable[[bytes], Awaitable[None]]) -> Callable[[bytes], Awaitable[None]]:
        """Return a function that writes the next reply, and ends its request when it has left."""

        async def write_one(reply: bytes) -> None:
            await write(reply)
            _end_requests(self._keys.popleft())

        return write_one

    def close(self) -> None:
        """End all requests, also those that are still being cancelled."""
        self._is_over = True
        for keys in self._keys:
            _end_requests(keys)


def _asked(method: Method, message: bytes) -> Any:
    """Return a parsed message, or the bytes if the handler parses them. Raises BadRequest, also for a large message.

    It is parsed on the event loop. An administrator may send a model, and is told why it is refused.
    """
    if not method.request:
        return message
    if len(message) > _MAX_PARSED_BYTES and method.route.need != "admin":
        raise BadRequest(f"a message to {method.name} may have at most {_MAX_PARSED_BYTES} bytes")
    return parse(message_class(method.file, method.request), message)


def _end_requests(keys: list[KeyHolder]) -> None:
    """End the requests of keys, once."""
    while keys:
        keys.pop().end()


def _leave_key(exchange: Exchange, keys: list[KeyHolder] | None) -> None:
    """Leave the API key's request to the owner of keys, or end it here if there is none."""
    if exchange.holder is not None and keys is not None:
        keys.append(exchange.holder)
    elif exchange.holder is not None:
        exchange.holder.end()


def _exchange_of(call: Call, method: Method, message: bytes) -> Exchange:
    """Return the exchange of one message, which begins now."""
    exchange = Exchange(call, call, time.monotonic_ns())
    exchange.route = method.route
    exchange.body_bytes = len(message)
    return exchange


def _method(call: Call) -> Method:
    """Return the method of an accepted call, whose path is known."""
    assert isinstance(call.rpc, Method)
    return call.rpc


def _fail(call: Call, error: Exception) -> None:
    """End a call with an error status, for any exception."""
    if not isinstance(error, SieError):
        _log.error("%s failed", call.path, exc_info=error)
        error = Internal("internal error")
    call.finish(status_code(error), details(error))
