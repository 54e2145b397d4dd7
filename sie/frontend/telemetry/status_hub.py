"""Sends status frames to the watchers of `/ws/status`, up to a limit. Must never build a frame while nobody watches.

One frame is built and encoded for each tick, for any number of watchers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

_MAX_RECEIVED_BYTES = 64 * 1024
"""Watchers have no reason to send data; a watcher that sends this much is disconnected."""


class Message(Protocol):
    """The result of `Transport.receive`. Kind 0 is the client's close."""

    @property
    def kind(self) -> int: ...
    @property
    def data(self) -> bytes | str: ...


class Transport(Protocol):
    """The methods of Granian's RSGI websocket transport that are used here."""

    async def send_str(self, data: str) -> None: ...
    async def receive(self) -> Message: ...


class Websocket(Protocol):
    """The methods of Granian's RSGI websocket protocol that are used here."""

    async def accept(self) -> Transport: ...
    def close(self, status: int | None) -> object: ...


class StatusHub:
    """All watchers of one frontend process.

    frame builds one encoded frame. It is called once for each tick, and never while nobody watches. watchers_on_host
    counts the connections of all frontends, because the limit applies to the host; publish_watchers publishes our count.
    first returns what a watcher gets instead of its first frame. A watcher that does not take a frame within send_timeout_s is dropped. A slow watcher skips frames.
    """

    def __init__(
        self,
        frame: Callable[[], str],
        *,
        interval_s: float,
        max_watchers: int,
        watchers_on_host: Callable[[], int],
        publish_watchers: Callable[[int], None],
        first: Callable[[str], str] | None = None,
        send_timeout_s: float = 5.0,
    ) -> None:
        self._build = frame
        self._first: Callable[[str], str] = first or str
        self._interval_s = interval_s
        self._max_watchers = max_watchers
        self._watchers_on_host = watchers_on_host
        self._publish_watchers = publish_watchers
        self._send_timeout_s = send_timeout_s
        self._num_watchers = 0
        self._frame: str | None = None
        self._ticked = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False
        self._failing = False

    async def serve(self, websocket: Websocket, may_go_on: Callable[[], bool] | None = None) -> None:
        """Serve one connection to its end, or refuse it with 503 before the upgrade.

        may_go_on is called before each frame. The connection ends when it returns False.
        """
        if self._closing or max(self._num_watchers, self._watchers_on_host()) >= self._max_watchers:
            websocket.close(503)
            return
        self._count(+1)
        try:
            await self._watch(await websocket.accept(), may_go_on)
        finally:
            self._count(-1)
            websocket.close(None)

    def close(self) -> None:
        """Disconnect all watchers and admit no more."""
        self._closing = True
        self._ticked.set()

    def _count(self, change: int) -> None:
        self._num_watchers += change
        self._publish_watchers(self._num_watchers)

    async def _watch(self, transport: Transport, may_go_on: Callable[[], bool] | None) -> None:
        """Send frames until either side ends the connection."""
        if self._ticker is None:
            self._frame = self._try_build()
            self._ticker = asyncio.create_task(self._tick())
        sender = asyncio.create_task(self._send_frames(transport, may_go_on))
        reader = asyncio.create_task(_read_to_end(transport))
        try:
            await asyncio.wait((sender, reader), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sender.cancel()
            reader.cancel()

    async def _send_frames(self, transport: Transport, may_go_on: Callable[[], bool] | None) -> None:
        make = self._first
        while not self._closing and (may_go_on is None or may_go_on()):
            ticked = self._ticked
            if self._frame is not None:
                text, make = make(self._frame), str
                try:
                    async with asyncio.timeout(self._send_timeout_s):
                        await transport.send_str(text)
                except TimeoutError:
                    log.info("dropped a status watcher that read nothing for %.0f s", self._send_timeout_s)
                    return
                except RuntimeError:  # Granian's ProtocolClosed and ProtocolError: the client has gone
                    return
            await ticked.wait()

    async def _tick(self) -> None:
        """Build one frame for each interval, while there are watchers."""
        while True:
            await asyncio.sleep(self._interval_s)
            if self._num_watchers == 0 or self._closing:
                self._ticker = None
                return
            self._frame = self._try_build()
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()

    def _try_build(self) -> str | None:
        """Return a frame, or None if building failed. Watchers then wait for the next tick."""
        try:
            frame = self._build()
        except Exception:
            if not self._failing:  # log once, not at every tick
                log.exception("cannot build the status frame")
            self._failing = True
            return None
        self._failing = False
        return frame


async def _read_to_end(transport: Transport) -> None:
    """Read until the client closes. Reading answers its pings; the messages themselves are ignored."""
    received = 0
    while received < _MAX_RECEIVED_BYTES:
        try:
            message = await transport.receive()
        except RuntimeError:  # as in `_send_frames`
            return
        if message.kind == 0:
            return
        received += len(message.data) + 1
