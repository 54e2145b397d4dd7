"""Serves small requests in two event-loop callbacks: one submits the request, one sends the answer. Must never wait.

The fast path takes only requests that wait for a worker alone (in a gateway: for a host). These are encode and tensor
requests for a loaded model. A task serves every other request, and also a request whose model is unloaded meanwhile.
Both paths check, count and answer in the same way.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sie.frontend.engine.interface import Pending, Reply
from sie.frontend.http.response import Response
from sie.frontend.http.routing import Route
from sie.frontend.routes.table import match_path
from sie.runtime.ends_of_work import ENDS_OF_WORK
from sie.values.errors import Unavailable

if TYPE_CHECKING:
    from sie.frontend.http.exchange import Exchange
    from sie.frontend.process import FrontendProcess


class Work(Protocol):
    """A request that was submitted to a worker, or to hosts."""

    pending: Pending

    def answer(self, raw: Reply, /) -> Response | Awaitable[Response]:
        """Return the answer for the worker's reply, or an awaitable where encoding takes long. Releases the reply."""
        ...

    def retry(self, error: Unavailable, /) -> Awaitable[Response]:
        """Serve the request again after its model was unloaded. Raises the error if the model does not come back."""
        ...


TrySubmit = Callable[["Exchange"], Work | None]
"""Submits a request whose body has arrived. Returns None, without visible effects, if a task must serve the request."""


class ErrorBoundary(Protocol):
    """The part of the app that answers, counts and logs every request, failed ones included."""

    def serve(self, exchange: Exchange) -> Coroutine[Any, Any, None]: ...

    def guard(self, exchange: Exchange, work: Awaitable[None]) -> Coroutine[Any, Any, None]: ...

    def fail(self, exchange: Exchange, error: BaseException) -> None: ...

    def respond(self, exchange: Exchange, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...


class FastPath:
    """The fast path of one process, for the routes that have a submitter."""

    def __init__(
        self, boundary: ErrorBoundary, process: FrontendProcess, submitters: Mapping[Route, TrySubmit]
    ) -> None:
        self._boundary = boundary
        self._process = process
        self._submitters = submitters

    def take(self, exchange: Exchange) -> None:
        """Serve a request here if its body has arrived and its route has a submitter, or else in a task."""
        scope, body = exchange.scope, exchange.body
        matched = match_path(scope.path)
        try_submit = self._submitters.get(matched.route) if matched is not None else None
        if matched is None or try_submit is None or scope.method != "POST" or body is None or not body.done():
            self.spawn(self._boundary.serve(exchange))
            return
        exchange.route, exchange.model, _ = matched
        try:
            if self._process.access is not None:
                self._process.access.admit(exchange, matched.route.need)
            elif self._process.host_check is not None:
                self._process.host_check.check(exchange.headers)
        except Exception as error:
            self._boundary.fail(exchange, error)
            return
        self._submit(exchange, try_submit)

    def take_in_own_context(self, exchange: Exchange) -> None:
        """Take a request in a context of its own, as a task would have. A gateway keeps the request's placement there."""
        contextvars.copy_context().run(self.take, exchange)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task, and hold a reference to it: the event loop keeps only weak ones."""
        task = asyncio.get_running_loop().create_task(work)
        self._process.requests.add(task)
        task.add_done_callback(self._process.requests.discard)

    def _submit(self, exchange: Exchange, try_submit: TrySubmit) -> None:
        try:
            work = try_submit(exchange)
        except ENDS_OF_WORK:
            raise
        except BaseException as error:
            self._fail(exchange, error)
            return
        if work is None:
            exchange.route = None  # `serve` finds the route again, as for every request without a submitter
            self.spawn(self._boundary.serve(exchange))
        else:
            work.pending.future.add_done_callback(partial(self._end, exchange, work))

    def _end(self, exchange: Exchange, work: Work, future: asyncio.Future[Reply]) -> None:
        error = future.exception()
        if isinstance(error, Unavailable):
            self.spawn(self._boundary.guard(exchange, self._send(exchange, work.retry(error))))
            return
        try:
            response = work.answer(future.result())
            if not isinstance(response, Response):
                self.spawn(self._boundary.guard(exchange, self._send(exchange, response)))
                return
            self._boundary.respond(exchange, *response)
        except Exception as failure:
            self._fail(exchange, failure)
        else:
            _end_key_use(exchange)

    def _fail(self, exchange: Exchange, error: BaseException) -> None:
        self._boundary.fail(exchange, error)
        _end_key_use(exchange)

    async def _send(self, exchange: Exchange, response: Awaitable[Response]) -> None:
        try:
            self._boundary.respond(exchange, *await response)
        finally:
            _end_key_use(exchange)


def _end_key_use(exchange: Exchange) -> None:
    if exchange.holder is not None:
        exchange.holder.end()
