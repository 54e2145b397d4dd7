"""Watches the connections of waiting requests, and abandons the work when a client leaves."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final, Protocol

from sie.frontend.engine.interface import Pending
from sie.values.errors import ClientGone, SieError

_WATCH_AFTER_NS: Final = 50_000_000
"""A request that waits longer than this gets a connection watcher; most are answered sooner."""


class Abandons(Protocol):
    """An engine, or operations elsewhere."""

    def abandon(self, pending: Pending, error: SieError) -> None:
        """End the client's wait with an error."""
        ...


class ClientWatch:
    """The waiting requests of one frontend, with their connections."""

    def __init__(self, engine: Abandons) -> None:
        self._engine = engine
        self._unwatched: deque[tuple[Pending, Any]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, pending: Pending, protocol: Any) -> None:
        """Abandon the request if its client leaves before the answer is ready."""
        self._unwatched.append((pending, protocol))

    def tick(self, now_ns: int) -> None:
        """Start to watch the clients of requests older than `_WATCH_AFTER_NS`."""
        unwatched = self._unwatched
        while unwatched and (unwatched[0][0].future.done() or now_ns - unwatched[0][0].submitted_ns > _WATCH_AFTER_NS):
            pending, protocol = unwatched.popleft()
            if not pending.future.done():
                task = asyncio.get_running_loop().create_task(self._await_disconnect(pending, protocol))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _await_disconnect(self, pending: Pending, protocol: Any) -> None:
        gone = asyncio.ensure_future(protocol.client_disconnect())
        try:
            await asyncio.wait((gone, pending.future), return_when=asyncio.FIRST_COMPLETED)
            if not pending.future.done():
                self._engine.abandon(pending, ClientGone("the client left before its answer was there"))
        finally:
            gone.cancel()
