"""Moves requests from Granian's threads to the event loop, with one wake-up for headers and small body. Never blocks.

Granian hands a request over when its headers have arrived. A handler then requests the body, and a second wake-up
delivers it. Each wake-up costs a wait for the GIL, a wake-up of the event loop and a pass of a task through it. So the
thread that hands a request over requests a small body here, and the loop gets the request when the body has arrived.
Requests with a large, late or missing body, or with `Expect`, take Granian's usual path. Source: granian 2.8, `_futures`.
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

_CHECK_EVERY_S: Final = 0.02
_LATE_NS: Final = 20_000_000
"""After this time a handler waits for the late body, with the usual limits on bodies."""
_MAX_DIGITS: Final = len(str(LARGE_BYTES - 1))


class Arrival:
    """A request that waits for its small body. Granian calls it when the body has arrived or can no longer arrive."""

    __slots__ = ("_exchange", "_take")

    def __init__(self, exchange: Exchange, take: Callable[[Exchange], None]) -> None:
        self._exchange: Exchange | None = exchange
        self._take = take

    def is_due(self, late_ns: int) -> bool:
        """Whether the wait is over: the request has started, or its headers arrived before late_ns."""
        return self._exchange is None or self._exchange.began_ns < late_ns

    def __call__(self, _body: object) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._take(exchange)


class Intake:
    """The incoming requests of one process. take gets requests with a small body, present or late; serve gets all others."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[Exchange], None],
        serve: Callable[[Any], Coroutine[Any, Any, None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._loop = loop
        self._take = take
        self._serve = serve
        self._spawn = spawn
        self._arrivals: deque[Arrival] = deque()
        loop.call_later(_CHECK_EVERY_S, self._start_late)

    def schedule(self, watcher: Any) -> None:
        """Accept a request from Granian. Must not block, because a thread of Granian calls it."""
        scope, protocol = watcher.scope, watcher.proto
        exchange = Exchange(scope, protocol, time.monotonic_ns())
        if _has_small_body(exchange.headers) and scope.proto == "http":
            exchange.body = body = protocol()
            arrival = Arrival(exchange, self._take)
            self._arrivals.append(arrival)
            body.add_done_callback(arrival)
        else:
            self._loop.call_soon_threadsafe(self._hand_over, watcher)

    def _hand_over(self, watcher: Any) -> None:
        self._spawn(self._serve(watcher))

    def _start_late(self) -> None:
        """Start the requests whose bodies are late; their handlers wait for the bodies."""
        arrivals, late_ns = self._arrivals, time.monotonic_ns() - _LATE_NS
        while arrivals and arrivals[0].is_due(late_ns):
            arrivals.popleft()(None)
        self._loop.call_later(_CHECK_EVERY_S, self._start_late)


def _has_small_body(headers: Any) -> bool:
    """Tell whether a body may be requested before its request is checked.

    The length must be certain and small, and the client must not wait for `100 Continue`.
    """
    length = headers.get("content-length")
    if length is None or not 0 < len(length) <= _MAX_DIGITS or not length.isdecimal() or int(length) >= LARGE_BYTES:
        return False
    return "transfer-encoding" not in headers and "expect" not in headers


class Scheduler(CallbackScheduler):
    """Replaces Granian's scheduler, to which its threads hand requests."""

    def __new__(cls, loop: asyncio.AbstractEventLoop, schedule: Callable[[Any], None]) -> Self:
        """Pass each request to schedule and none to Granian's own callback."""
        # Granian's stub does not name the arguments: a loop, and those of Granian's own callback.
        create: Any = super().__new__
        scheduler: Any = create(cls, loop, None, None, None, None)
        scheduler._schedule_fn = schedule
        return scheduler
