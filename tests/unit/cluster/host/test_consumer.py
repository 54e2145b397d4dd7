"""The count of what a host has asked for: exact under traffic, and right again after requests were lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from sie.cluster.host import consumer as module
from sie.cluster.host.consumer import Consumer
from sie.cluster.subjects import Lane

ROOM = 64
ITEM = SimpleNamespace(headers=None, reply="$JS.ACK.one")


class Server:
    """The leader of a consumer, on a clock that a test moves: it fills requests in the order in which they came."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waiting: list[tuple[str, list[int], float]] = []
        self.listeners: dict[str, Callable[[Any], Awaitable[None]]] = {}

    async def make_consumer(self, *_: object) -> None: ...

    async def subscribe(self, subject: str, on_message: Callable[[Any], Awaitable[None]]) -> Any:
        self.listeners[subject] = on_message
        return SimpleNamespace()

    async def publish(self, _subject: str, data: bytes, reply: str) -> None:
        request = json.loads(data)
        self.waiting.append((reply, [request["batch"]], self.now_s + request["expires"] / 1e9))

    @property
    def num_open(self) -> int:
        return sum(left[0] for _, left, _ in self.waiting)

    async def expire(self) -> None:
        while self.waiting and self.waiting[0][2] <= self.now_s:
            reply, left, _ = self.waiting.pop(0)
            headers = {"Status": "408", "Nats-Pending-Messages": str(left[0])}
            await self.listeners[reply](SimpleNamespace(headers=headers, reply=""))

    async def deliver(self) -> None:
        if self.waiting:
            reply, left, _ = self.waiting[0]
            left[0] -= 1
            if not left[0]:
                self.waiting.pop(0)
            await self.listeners[reply](ITEM)


def test_requests_that_a_leader_lost_count_no_longer_than_they_could_last(monkeypatch):
    server, running = Server(), list[float]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: server.now_s))

    async def take(_message: Any) -> int:
        running.append(server.now_s + 0.2)
        return 1

    async def test() -> None:
        consumer = Consumer(server, Lane("p", "any", "any"), "m", "inbox", take)  # type: ignore[arg-type]
        await consumer.open()
        for step in range(6000):  # of 5 ms: 30 s with 200 items a second
            server.now_s = step * 0.005
            await server.expire()
            await server.deliver()
            running[:] = [end_s for end_s in running if end_s > server.now_s]
            await consumer.pull(ROOM - len(running))
            if server.now_s < 8.0 or server.now_s > 18.5:
                assert consumer.num_asked == server.num_open, server.now_s
            if server.now_s == 8.0:
                assert server.num_open > 10
                server.waiting.clear()

    asyncio.run(test())


def test_requests_that_nothing_came_of_end(monkeypatch):
    server = Server()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: server.now_s))

    async def test() -> None:
        consumer = Consumer(server, Lane("p", "any", "any"), "m", "inbox", SimpleNamespace())  # type: ignore[arg-type]
        await consumer.open()
        await consumer.pull(ROOM)
        await consumer.pull(ROOM)
        assert consumer.num_asked == server.num_open == ROOM
        server.waiting.clear()
        server.now_s = 5.0
        assert consumer.num_asked == 0
        await consumer.pull(ROOM)
        assert consumer.num_asked == server.num_open == ROOM

    asyncio.run(test())
