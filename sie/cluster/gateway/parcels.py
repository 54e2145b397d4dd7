"""Packs the work items of a gateway in messages and publishes them: short items that leave together are one parcel."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.gateway.work_items import Item, Parcel
from sie.cluster.payloads import VERSION, Work, Works, encode
from sie.cluster.subjects import Lane, work_subject

_PARCEL_BYTES: Final = 4096
"""The most bytes of the items of a parcel: one host runs them, in about a step of a CPU."""


class PublishMetrics(Protocol):
    """The metrics of publishing; durations in seconds."""

    def record_published(self, operation: str, duration_s: float) -> None:
        """Count a message that NATS has confirmed."""
        ...


class Parcels:
    """The messages of one gateway process."""

    def __init__(
        self, connection: Connection, gateway: str, metrics: PublishMetrics | None, together: Callable[[Lane, str], int]
    ) -> None:
        """Publish over this connection. `together` returns how many items of a lane and model a message may have."""
        self._connection = connection
        self._gateway = gateway
        self._metrics = metrics
        self._together = together
        self._numbers = itertools.count(1)

    def pack(self, items: Sequence[Item]) -> list[Parcel]:
        """Return items of one lane and model as parcels, in order. An item that was lost with a host gets a parcel of its own."""
        groups: list[list[Item]] = []
        left_bytes = left = 0
        most = self._together(items[0].lane, items[0].work.model) if items else 0
        for item in items:
            left_bytes -= len(item.work.body)
            left -= 1
            if left < 0 or left_bytes < 0 or item.lost_with:
                groups.append([])
                left_bytes, left = _PARCEL_BYTES - len(item.work.body), 0 if item.lost_with else most - 1
            groups[-1].append(item)
        return [self.parcel(group) for group in groups]

    def parcel(self, items: Sequence[Item]) -> Parcel:
        """Return items as one parcel."""
        return Parcel(f"{self._gateway}-{next(self._numbers)}", items)

    async def publish(self, parcel: Parcel) -> None:
        """Publish a parcel's items, as the same message each time. Raises Overloaded and Unavailable."""
        first = next(iter(parcel.items))
        lane, model, operation = first.lane, first.work.model, first.work.operation
        await self._connection.join_pool(lane.pool)
        packed = {item: await self._inline(item) for item in list(parcel.items)}
        works = [work for item, work in packed.items() if item in parcel.items]
        if not works:  # their requests ended meanwhile
            return
        began_s = time.monotonic()
        parcel.sequence = await self._connection.enqueue(
            lane.pool, work_subject(lane, model), encode(Works(VERSION, works)), parcel.name
        )
        if self._metrics is not None:
            self._metrics.record_published(operation, time.monotonic() - began_s)

    async def _inline(self, item: Item) -> Work:
        """Return an item for a message, with its deadline on the server's clock as it is now. A large one refers to its payload in the store."""
        work = item.work
        deadline_ns = self._connection.clock.to_server(item.pending.deadline_ns)
        if len(work.body) > INLINE_BYTES - len(work.reply_to) and not item.stored:
            item.stored = await self._connection.keep(item.lane.pool, work.id, work.body)
            if item.parcel is None:  # its request ended meanwhile
                stored, item.stored = item.stored, ""
                await self._connection.forget(item.lane.pool, stored)
        body = work.body if not item.stored else memoryview(b"")
        return Work(VERSION, work.id, work.reply_to, deadline_ns, work.operation, work.model, body, item.stored)
