"""Owns how a request comes from Granian's threads to the event loop: one wake-up for its headers and its body together.

Granian hands a request over when its headers are there; a handler then asks for the body, and is woken a second time when
that is. Each time a thread waits for the interpreter, the event loop is woken and a task goes round in it. A small body
is asked for here by the thread that hands the request over, and the loop hears of the request when the body is there.
Whatever keeps its client's body waiting, has a large one or none is handed over as ever. Source: granian 2.8, `_futures`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, Self

from granian._granian import CallbackScheduler

from sie.frontend.http.exchange import Exchange
from sie.frontend.http.threads import LARGE_BYTES

_LOOK_EVERY_S: Final = 0.02
_LATE_NS: Final = 20_000_000
"""A body that is not there so long after its headers is waited for by a handler, whose limits are those of any body."""
_MAX_DIGITS: Final = len(str(LARGE_BYTES - 1))


class Arrival:
    """A request whose body is on its way; called when that is there, or cannot come any more."""

    __slots__ = ("_begin", "_exchange")

    def __init__(self, exchange: Exchange, begin: Callable[[Exchange], None]) -> None:
        self._exchange: Exchange | None = exchange
        self._begin = begin

    def is_due(self, late_ns: int) -> bool:
        """Whether nothing is left to wait for: it has begun, or its headers came before late_ns."""
        return self._exchange is None or self._exchange.began_ns < late_ns

    def __call__(self, _body: object) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._begin(exchange)


class Intake:
    """The requests of one process that come in. begin takes one whose body is there or late, serve any other."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        begin: Callable[[Exchange], None],
        serve: Callable[[Any], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._loop = loop
        self._begin = begin
        self._serve = serve
        self._spawn = spawn
        self._arrivals: deque[Arrival] = deque()
        loop.call_later(_LOOK_EVERY_S, self._look)

    def schedule(self, watcher: Any) -> None:
        """Take a request from Granian. Called by a thread of its own, which must not wait."""
        scope, protocol = watcher.scope, watcher.proto
        exchange = Exchange(scope, protocol, time.monotonic_ns())
        if _has_small_body(exchange.headers) and scope.proto == "http":
            exchange.body = body = protocol()
            arrival = Arrival(exchange, self._begin)
            self._arrivals.append(arrival)
            body.add_done_callback(arrival)
        else:
            self._loop.call_soon_threadsafe(self._hand_over, watcher)

    def _hand_over(self, watcher: Any) -> None:
        self._spawn(self._serve(watcher))

    def _look(self) -> None:
        """Let handlers wait for the bodies that are late."""
        arrivals, late_ns = self._arrivals, time.monotonic_ns() - _LATE_NS
        while arrivals and arrivals[0].is_due(late_ns):
            arrivals.popleft()(None)
        self._loop.call_later(_LOOK_EVERY_S, self._look)


def _has_small_body(headers: Any) -> bool:
    """Tell whether a body may be asked for before anything else is known of its request.

    Not where a client waits to hear that it is wanted, and not where its length is in doubt.
    """
    length = headers.get("content-length")
    if length is None or not 0 < len(length) <= _MAX_DIGITS or not length.isdecimal() or int(length) >= LARGE_BYTES:
        return False
    return "transfer-encoding" not in headers and "expect" not in headers


class Scheduler(CallbackScheduler):
    """What Granian's threads hand requests to."""

    def __new__(cls, loop: asyncio.AbstractEventLoop, schedule: Callable[[Any], None]) -> Self:
        """Hand each request to schedule, and none to a callback of Granian's own."""
        create: Any = (
            super().__new__
        )  # whose arguments granian's stub does not name: a loop, and what its own way needs
        scheduler: Any = create(cls, loop, None, None, None, None)
        scheduler._schedule_fn = schedule
        return scheduler
