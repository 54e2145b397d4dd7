"""Publishes the results of a host and then acknowledges their items, as few messages.

Results of one turn of the event loop leave together: those of a step are one message for each gateway.
ORDER: a message with items is acknowledged only after the results of all of them were published on the same connection,
so a host that dies at any point leaves either the results or the items.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.payloads import VERSION, Result, encode
from sie.runtime import failpoints
from sie.runtime.logs import get_logger
from sie.values.errors import Unavailable

_log = get_logger(__name__)
_HEAD_BYTES: Final = 64


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    """A `sie.cluster.payloads.Results` whose results are encoded already."""

    version: int
    items: list[msgspec.Raw]


class Outbox:
    """The results that one host has to publish."""

    def __init__(self, connection: Connection, on_sent: Callable[[], Awaitable[None]]) -> None:
        """Set up without sending; on_sent is called after each sending."""
        self._connection = connection
        self._on_sent = on_sent
        self._results: defaultdict[str, list[bytes]] = defaultdict(list)
        self._acknowledged: list[str] = []
        self._sending: asyncio.Task[None] | None = None

    def add(self, reply_to: str, result: Result) -> None:
        """Publish a result soon."""
        self._results[reply_to].append(encode(result))
        self._send_soon()

    def acknowledge(self, subject: str) -> None:
        """Acknowledge a message soon, after the results that were added before have been published."""
        self._acknowledged.append(subject)
        self._send_soon()

    def _send_soon(self) -> None:
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        while self._results or self._acknowledged:
            results, self._results = self._results, defaultdict(list)
            acknowledged, self._acknowledged = self._acknowledged, []
            try:
                for reply_to, packed in results.items():
                    await self._publish(reply_to, packed)
                failpoints.reach("cluster.published")
                for subject in acknowledged:
                    await self._connection.publish(subject, b"+ACK")
            except Unavailable as error:  # not even the buffer takes it: the server delivers the items again
                _log.warning("answers could not be published: %s", error.message)
        self._sending = None
        await self._on_sent()

    async def _publish(self, reply_to: str, packed: list[bytes]) -> None:
        """Publish the results for a gateway, as many in a message as there is room for."""
        group, num_bytes = list[msgspec.Raw](), _HEAD_BYTES
        for one in packed:
            if group and num_bytes + len(one) > INLINE_BYTES:
                await self._connection.publish(reply_to, encode(_Packed(VERSION, group)))
                group, num_bytes = [], _HEAD_BYTES
            group.append(msgspec.Raw(one))
            num_bytes += len(one)
        await self._connection.publish(reply_to, encode(_Packed(VERSION, group)))

    async def flush(self) -> None:
        """Wait until everything that was added is published."""
        while self._sending is not None:
            await asyncio.wait((self._sending,))
