"""Who may watch, what a watcher is sent and when it is dropped. The websocket is a fake with Granian's methods."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest

from sie.frontend.telemetry.status_hub import StatusHub

DEADLINE_S = 60.0


class Message(NamedTuple):
    kind: int
    data: bytes | str


CLOSE = Message(0, "")


class FakeSocket:
    """Both halves of an RSGI websocket. `blocked` makes every send wait, as a client that reads nothing does."""

    def __init__(self, *, blocked=False, gone=False):
        self.sent: asyncio.Queue[str] = asyncio.Queue()
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.blocked = blocked
        self.gone = gone
        self.accepted = False
        self.closed = []

    async def accept(self):
        self.accepted = True
        return self

    async def send_str(self, data):
        if self.gone:
            raise RuntimeError("ProtocolClosed")
        if self.blocked:
            await asyncio.Event().wait()
        self.sent.put_nowait(data)

    async def receive(self):
        return await self.incoming.get()

    def close(self, status):
        self.closed.append(status)


class Frames:
    """Counts how often a frame is built; `fail` makes the next builds raise."""

    def __init__(self):
        self.num_built = 0
        self.fail = False

    def __call__(self):
        self.num_built += 1
        if self.fail:
            raise ValueError("broken page")
        return f"frame {self.num_built}"


def make_hub(
    frames, *, interval_s=0.01, max_watchers=4, on_host=lambda: 0, published=None, send_timeout_s=DEADLINE_S, first=None
):
    return StatusHub(
        frames,
        interval_s=interval_s,
        max_watchers=max_watchers,
        watchers_on_host=on_host,
        publish_watchers=(published if published is not None else []).append,
        send_timeout_s=send_timeout_s,
        first=first,
    )


def run(scenario):
    async def bounded():
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(bounded())


async def eventually(condition):
    """Wait until the condition holds; the deadline is the scenario's."""
    while not condition():  # noqa: ASYNC110  # what is waited for sets no event that a test could see
        await asyncio.sleep(0.001)


async def end(task, socket):
    socket.incoming.put_nowait(CLOSE)
    await task


def test_each_watcher_s_first_frame_has_what_was_before():
    async def scenario():
        hub = make_hub(Frames(), first=lambda frame: frame + " and history")
        for _ in range(2):
            socket = FakeSocket()
            task = asyncio.create_task(hub.serve(socket))
            assert (await socket.sent.get()).endswith("and history")
            assert not (await socket.sent.get()).endswith("and history")
            await end(task, socket)

    run(scenario)


def test_first_frame_comes_at_once_and_the_next_with_the_tick():
    async def scenario():
        hub, socket = make_hub(Frames()), FakeSocket()
        task = asyncio.create_task(hub.serve(socket))
        assert await socket.sent.get() == "frame 1"
        assert await socket.sent.get() == "frame 2"
        await end(task, socket)
        assert socket.closed == [None]

    run(scenario)


def test_a_tick_builds_one_frame_however_many_watch():
    async def scenario():
        frames = Frames()
        hub, sockets = make_hub(frames, max_watchers=40), [FakeSocket() for _ in range(40)]
        tasks = [asyncio.create_task(hub.serve(socket)) for socket in sockets]
        received = [[await socket.sent.get() for _ in range(3)] for socket in sockets]
        assert all(each == ["frame 1", "frame 2", "frame 3"] for each in received)
        for task, socket in zip(tasks, sockets, strict=True):
            await end(task, socket)

    run(scenario)


def test_nothing_is_built_while_nobody_watches():
    async def scenario():
        frames, scenario_task = Frames(), asyncio.current_task()
        hub, socket = make_hub(frames), FakeSocket()
        task = asyncio.create_task(hub.serve(socket))
        await socket.sent.get()
        await end(task, socket)
        await eventually(lambda: not asyncio.all_tasks() - {scenario_task})  # the ticker ends by itself
        built = frames.num_built
        second = FakeSocket()
        task = asyncio.create_task(hub.serve(second))
        assert await second.sent.get() == f"frame {built + 1}"
        await end(task, second)

    run(scenario)


@pytest.mark.parametrize("on_host", [0, 2])
def test_one_watcher_too_many_is_refused_before_the_upgrade(on_host):
    async def scenario():
        hub = make_hub(Frames(), max_watchers=2, on_host=lambda: on_host)
        sockets, tasks = [], []
        for _ in range(0 if on_host else 2):
            sockets.append(FakeSocket())
            tasks.append(asyncio.create_task(hub.serve(sockets[-1])))
            await sockets[-1].sent.get()
        refused = FakeSocket()
        await hub.serve(refused)
        assert (refused.accepted, refused.closed) == (False, [503])
        for task, socket in zip(tasks, sockets, strict=True):
            await end(task, socket)

    run(scenario)


def test_a_place_is_free_again_when_a_watcher_leaves():
    async def scenario():
        published = []
        hub = make_hub(Frames(), max_watchers=1, published=published)
        for _ in range(3):
            socket = FakeSocket()
            task = asyncio.create_task(hub.serve(socket))
            await socket.sent.get()
            await end(task, socket)
        assert published == [1, 0, 1, 0, 1, 0]

    run(scenario)


def test_a_watcher_that_reads_nothing_is_dropped_and_its_neighbour_goes_on():
    async def scenario():
        hub, slow, quick = make_hub(Frames(), send_timeout_s=0.05), FakeSocket(blocked=True), FakeSocket()
        slow_task = asyncio.create_task(hub.serve(slow))
        quick_task = asyncio.create_task(hub.serve(quick))
        await slow_task
        assert slow.closed == [None]
        before = quick.sent.qsize()
        await eventually(lambda: quick.sent.qsize() >= before + 3)
        await end(quick_task, quick)

    run(scenario)


def test_a_watcher_whose_connection_broke_is_forgotten():
    async def scenario():
        published = []
        await make_hub(Frames(), published=published).serve(FakeSocket(gone=True))
        assert published == [1, 0]

    run(scenario)


def test_a_watcher_that_talks_is_ignored_until_it_talks_too_much():
    async def scenario():
        hub, socket = make_hub(Frames()), FakeSocket()
        task = asyncio.create_task(hub.serve(socket))
        socket.incoming.put_nowait(Message(2, "hello"))
        assert await socket.sent.get() == "frame 1"
        assert await socket.sent.get() == "frame 2"
        for _ in range(65):
            socket.incoming.put_nowait(Message(1, bytes(1024)))
        await task
        assert socket.closed == [None]

    run(scenario)


def test_a_watcher_that_may_no_longer_go_on_is_ended_and_its_neighbour_stays():
    async def scenario():
        hub, guest, other = make_hub(Frames()), FakeSocket(), FakeSocket()
        may = [True]
        tasks = [
            asyncio.create_task(hub.serve(guest, lambda: may[0])),
            asyncio.create_task(hub.serve(other, lambda: True)),
        ]
        await guest.sent.get()
        may[0] = False
        await tasks[0]
        assert guest.closed == [None]
        while not other.sent.empty():
            other.sent.get_nowait()
        assert (await other.sent.get()).startswith("frame ")
        await end(tasks[1], other)

    run(scenario)


def test_closing_ends_every_watcher_and_admits_no_more():
    async def scenario():
        hub, socket = make_hub(Frames(), interval_s=60), FakeSocket()
        task = asyncio.create_task(hub.serve(socket))
        await socket.sent.get()
        hub.close()
        await task
        late = FakeSocket()
        await hub.serve(late)
        assert late.closed == [503]

    run(scenario)


def test_a_frame_that_cannot_be_built_is_logged_once_and_watchers_stay(caplog):
    async def scenario():
        frames = Frames()
        frames.fail = True
        hub, socket = make_hub(frames), FakeSocket()
        task = asyncio.create_task(hub.serve(socket))
        await eventually(lambda: frames.num_built >= 4)
        frames.fail = False
        assert (await socket.sent.get()).startswith("frame ")
        await end(task, socket)

    run(scenario)
    assert [record.message for record in caplog.records] == ["cannot build the status frame"]
