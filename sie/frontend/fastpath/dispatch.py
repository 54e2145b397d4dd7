"""Owns the short way of a small request: to a worker when its body is there, to its client when the reply is.

Two callbacks of the event loop instead of a task. Only what waits for nothing but a worker goes this way: encode requests
and tensors for a model that is loaded. Everything else goes on as if this file were not there, and so does a request whose
model turns out to have gone meanwhile. What is checked, counted and answered is the same on both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from sie.frontend.engine.worker_link import Pending, Reply
from sie.frontend.http import routes
from sie.frontend.http.response import Response
from sie.values.errors import Unavailable

if TYPE_CHECKING:
    from sie.frontend.http.exchange import Exchange
    from sie.frontend.process import FrontendProcess


_MAX_KEPT_CHARS: Final = 256
_match: Final = lru_cache(maxsize=1024)(routes.match)


class Work(Protocol):
    """A request that a worker has."""

    pending: Pending

    def answer(self, raw: Reply, /) -> Response | Awaitable[Response]:
        """Return the answer that its reply makes, to be awaited where that takes long; the reply is let go then."""
        ...

    def again(self, error: Unavailable, /) -> Awaitable[Response]:
        """Serve it anew when its model was gone; raise the error when it is not to come back."""
        ...


Begin = Callable[["Exchange"], Work | None]
"""What submits a request whose body is there; None, having done nothing that shows, for one that is not for this way."""


class Border(Protocol):
    """The app's border, where requests end."""

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None]: ...

    def guard(self, exchange: Exchange, work: Awaitable[None]) -> Coroutine[Any, Any, None]: ...

    def fail(self, exchange: Exchange, error: Exception) -> None: ...

    def respond(self, exchange: Exchange, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...


class ShortWay:
    """The short way of one process. begins has what submits a request, by the route's template."""

    def __init__(self, border: Border, process: FrontendProcess, begins: Mapping[str, Begin]) -> None:
        self._border = border
        self._process = process
        self._begins = begins

    def take(self, exchange: Exchange) -> None:
        """Serve a request whose body is there; one whose body is late, too, with a task that waits for it."""
        path, scope, body = exchange.scope.path, exchange.scope, exchange.body
        matched = _match(path) if len(path) <= _MAX_KEPT_CHARS else routes.match(path)
        begin = self._begins.get(matched.route.template) if matched is not None else None
        if matched is None or begin is None or scope.method != "POST" or body is None or not body.done():
            self.spawn(self._border.serve(exchange))
            return
        exchange.route, exchange.model = matched
        try:
            if self._process.access is not None:
                self._process.access.admit(exchange, matched.route.need)
        except Exception as error:
            self._border.fail(exchange, error)
            return
        self._submit(exchange, begin)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what needs a task; the event loop itself keeps none alive."""
        task = asyncio.get_running_loop().create_task(work)
        self._process.requests.add(task)
        task.add_done_callback(self._process.requests.discard)

    def _submit(self, exchange: Exchange, begin: Begin) -> None:
        route = exchange.route
        try:
            work = begin(exchange)
        except Exception as error:
            self._fail(exchange, error)
            return
        if work is None:
            exchange.route = route
            self.spawn(self._border.serve(exchange))
        else:
            work.pending.future.add_done_callback(partial(self._end, exchange, work))

    def _end(self, exchange: Exchange, work: Work, future: asyncio.Future[Reply]) -> None:
        error = future.exception()
        if isinstance(error, Unavailable):
            self.spawn(self._border.guard(exchange, self._send(exchange, work.again(error))))
            return
        try:
            response = work.answer(future.result())
            if not isinstance(response, Response):
                self.spawn(self._border.guard(exchange, self._send(exchange, response)))
                return
            self._border.respond(exchange, *response)
        except Exception as failure:
            self._fail(exchange, failure)
        else:
            _leave(exchange)

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        self._border.fail(exchange, error)
        _leave(exchange)

    async def _send(self, exchange: Exchange, response: Awaitable[Response]) -> None:
        try:
            self._border.respond(exchange, *await response)
        finally:
            _leave(exchange)


def _leave(exchange: Exchange) -> None:
    if exchange.holder is not None:
        exchange.holder.end()
