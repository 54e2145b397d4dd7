"""Requests from Granian's threads: those with small bodies start with the body, all others take the usual way."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from granian._granian import CallbackScheduler
from granian.server import mp

from sie.frontend.http.exchange import Exchange
from sie.frontend.http.intake import Intake, Scheduler
from sie.frontend.http.threads import LARGE_BYTES

DEADLINE_S = 60.0


class Body:
    """Granian's future of a body: its callback comes by the loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.data: bytes | None = None
        self.callback: Callable[[Any], None] | None = None

    def arrive(self, data: bytes) -> None:
        self.data = data
        assert self.callback is not None
        self.loop.call_soon_threadsafe(self.callback, self)

    def done(self) -> bool:
        return self.data is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callback = callback


class Scope(NamedTuple):
    proto: str
    headers: dict[str, str]


class Watcher:
    """One request as Granian hands it over."""

    def __init__(self, proto: str = "http", **headers: str) -> None:
        self.body = Body()
        self.num_asked = 0
        self.scope = Scope(proto, {name.replace("_", "-"): value for name, value in headers.items()})

    def proto(self) -> Body:
        self.num_asked += 1
        return self.body


class Desk:
    """An intake, and what it passed on."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[Exchange] = asyncio.Queue()
        self.served: asyncio.Queue[Watcher] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.tasks: list[asyncio.Task[None]] = []
        self.intake = Intake(
            loop, self.begun.put_nowait, self.serve, lambda work: self.tasks.append(loop.create_task(work))
        )

    async def serve(self, watcher: Watcher) -> None:
        self.served.put_nowait(watcher)

    async def hand_over(self, watcher: Watcher) -> None:
        """Do as Granian does: from a thread of its own."""
        thread = threading.Thread(target=self.intake.schedule, args=(watcher,))
        thread.start()
        await asyncio.get_running_loop().run_in_executor(None, thread.join)


def run(test: Callable[[Desk], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await test(Desk())

    asyncio.run(main())


def test_request_with_a_small_body_begins_when_the_body_is_there():
    async def test(desk: Desk) -> None:
        watcher = Watcher(content_length="3")
        await desk.hand_over(watcher)
        watcher.body.arrive(b"abc")
        exchange = await desk.begun.get()
        assert exchange.body is watcher.body
        assert exchange.body.done()
        assert desk.served.empty()

    run(test)


def test_request_whose_body_is_late_begins_without_it_and_once():
    async def test(desk: Desk) -> None:
        watcher = Watcher(content_length="3")
        await desk.hand_over(watcher)
        exchange = await desk.begun.get()
        assert exchange.body is watcher.body
        assert not exchange.body.done()
        watcher.body.arrive(b"abc")
        second = Watcher(content_length="3")
        await desk.hand_over(second)
        second.body.arrive(b"def")
        assert (await desk.begun.get()).body is second.body, "the first body's arrival began nothing again"

    run(test)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content_length": "0" * 9},
        {"content_length": str(LARGE_BYTES)},
        {"content_length": "-1"},
        {"content_length": "x"},
        {"content_length": ""},
        {"transfer_encoding": "chunked"},
        {"content_length": "3", "transfer_encoding": "chunked"},
        {"content_length": "3", "expect": "100-continue"},
        {"content_length": "3", "proto": "ws"},
    ],
)
def test_any_other_request_is_handed_over_with_its_body_unread(headers):
    async def test(desk: Desk) -> None:
        watcher = Watcher(**headers)
        await desk.hand_over(watcher)
        assert await desk.served.get() is watcher
        assert watcher.num_asked == 0
        assert desk.begun.empty()

    run(test)


def test_granian_makes_its_scheduler_where_ours_takes_its_place():
    """Else requests would all go the long way, and nobody would notice."""
    assert callable(mp._new_cbscheduler)
    assert "_new_cbscheduler(" in inspect.getsource(mp.MPServer._spawn_rsgi_worker)

    async def make() -> None:
        scheduler = Scheduler(asyncio.get_running_loop(), lambda _watcher: None)
        assert isinstance(scheduler, CallbackScheduler)

    asyncio.run(make())
