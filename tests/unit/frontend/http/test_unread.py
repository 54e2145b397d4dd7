"""Answers count until their clients have read them, on real connections of this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sie.frontend.http.held_bytes import HeldBytes
from sie.frontend.http.unread import MIN_BYTES, UnreadAnswers

BIG = 1 << 20
DEADLINE_S = 60.0


class Key:
    """The part of a key's holder that is used."""

    def __init__(self, max_concurrent: int | None) -> None:
        self.key = SimpleNamespace(max_concurrent=max_concurrent)
        self.num_ended = 0

    def end(self) -> None:
        self.num_ended += 1


class Connections:
    """Connections whose server's end is in this process, and whose clients read only when they are told."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []

    def open(self) -> tuple[socket.socket, socket.socket, str]:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(self._listener.getsockname())
        ours, _ = self._listener.accept()
        ours.setblocking(False)
        self._open += (client, ours)
        host, port = client.getsockname()
        return ours, client, f"{host}:{port}"

    def close(self) -> None:
        for sock in (*self._open, self._listener):
            sock.close()


@pytest.fixture
def connections() -> Iterator[Connections]:
    found = Connections()
    yield found
    found.close()


def exchange(client: str, key: Key | None = None) -> Any:
    return SimpleNamespace(scope=SimpleNamespace(client=client), holder=key)


def fill(ours: socket.socket) -> None:
    """Send until the kernel takes no more."""
    try:
        while True:
            ours.send(bytes(65536))
    except BlockingIOError:
        pass


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # the kernel tells nobody
            await asyncio.sleep(0.005)


def drain(client: socket.socket, ours: socket.socket) -> None:
    ours.shutdown(socket.SHUT_WR)
    client.settimeout(DEADLINE_S)
    while client.recv(BIG):
        pass


def run(test: Callable[[HeldBytes, UnreadAnswers], Any], max_bytes: int = 1 << 40) -> None:
    async def inner() -> None:
        held = HeldBytes(max_bytes)
        await test(held, UnreadAnswers(held, asyncio.get_running_loop()))

    asyncio.run(inner())


@pytest.mark.parametrize("limit", [None, 1])
def test_an_answer_and_its_key_count_until_it_is_read(connections: Connections, limit: int | None):
    async def test(held: HeldBytes, answers: UnreadAnswers) -> None:
        ours, client, address = connections.open()
        key = Key(limit)
        asked = exchange(address, key)
        answers.add(asked, BIG)
        fill(ours)
        assert asked.holder is None, "the answer has taken the key's request over"
        answers.tick(1)
        answers.settle(key)  # type: ignore[arg-type]
        assert (held.num_bytes, key.num_ended) == (BIG, 0)
        drain(client, ours)
        answers.settle(key)  # type: ignore[arg-type]
        assert key.num_ended == 1
        clock = iter(range(10**9, 10**12, 10**9))
        await eventually(lambda: answers.tick(next(clock)) or held.num_bytes == 0)
        assert key.num_ended == 1

    run(test)


def test_a_key_at_its_limit_is_watched_without_a_tick(connections: Connections):
    async def test(held: HeldBytes, answers: UnreadAnswers) -> None:
        ours, client, address = connections.open()
        key = Key(1)
        answers.add(exchange(address, key), BIG)
        fill(ours)
        drain(client, ours)
        await eventually(lambda: key.num_ended == 1)

    run(test)


def test_the_next_answer_of_a_connection_replaces_the_one_before(connections: Connections):
    async def test(held: HeldBytes, answers: UnreadAnswers) -> None:
        _, _, address = connections.open()
        first, second = Key(None), Key(None)
        answers.add(exchange(address, first), 2 * BIG)
        answers.add(exchange(address, second), BIG)
        assert (first.num_ended, second.num_ended, held.num_bytes) == (1, 0, BIG)

    run(test)


def test_the_largest_answer_is_cut_and_the_others_are_not(connections: Connections):
    async def test(held: HeldBytes, answers: UnreadAnswers) -> None:
        opened = [connections.open() for _ in range(3)]
        keys = [Key(None) for _ in opened]
        for (ours, _, address), key, size in zip(opened, keys, (2, 4, 3), strict=True):
            answers.add(exchange(address, key), size * BIG)
            fill(ours)
        held.tick()
        assert held.num_bytes == 5 * BIG
        with pytest.raises(OSError):
            opened[1][0].send(b"more")
        answers.tick(1)
        assert [key.num_ended for key in keys] == [0, 1, 0]

    run(test, 6 * BIG)


def test_a_small_answer_is_not_counted():
    async def test(held: HeldBytes, answers: UnreadAnswers) -> None:
        key = Key(1)
        asked = exchange("127.0.0.1:1", key)
        answers.add(asked, MIN_BYTES - 1)
        assert (held.num_bytes, asked.holder) == (0, key)

    run(test)


def test_a_client_that_left_ends_its_answer():
    async def test(held: HeldBytes, answers: UnreadAnswers) -> None:
        key = Key(None)
        answers.add(exchange("127.0.0.1:1", key), BIG)
        answers.tick(1)
        assert (held.num_bytes, key.num_ended) == (0, 1)

    run(test)


def test_to_cut_half_of_many_looks_at_each_a_few_times():
    class Counted:
        num_held = num_looks = 0
        is_cut = may_be_read = False

        @property
        def can_be_cut(self) -> bool:
            Counted.num_looks += 1
            return True

        def measure(self) -> int:
            return self.num_held

        def cut(self) -> None:
            pass

    num = 1000
    held = HeldBytes(num * MIN_BYTES // 2)
    holdings = [Counted() for _ in range(num)]
    for holding in holdings:
        held.put(holding, MIN_BYTES)
    held.tick()
    assert sum(holding.is_cut for holding in holdings) == num // 2
    assert Counted.num_looks <= 4 * num
