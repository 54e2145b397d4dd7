"""New connections go to the listener that they are steered to, and to all of them again afterwards."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from sie.frontend.http.listeners import limit_unread_time, steer_to, stop_steering
from tests.process.harness import eventually


def listen(port: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(128)
    sock.setblocking(False)
    return sock


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(listen())
        yield [first, *(stack.enter_context(listen(first.getsockname()[1])) for _ in range(2))]


def spread(listeners: list[socket.socket]) -> list[int]:
    """Return how many of 60 new connections each listener gets. The kernel may hand one over a moment later."""
    counts = [0] * len(listeners)

    def are_all_there() -> bool:
        for number, listener in enumerate(listeners):
            counts[number] += count_waiting(listener)
        return sum(counts) == 60

    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(listeners[-1].getsockname()))
        eventually(are_all_there, "all connections are accepted")
    return counts


def count_waiting(listener: socket.socket) -> int:
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def test_connections_go_to_one_listener_until_steering_stops(listeners: list[socket.socket]) -> None:
    assert all(spread(listeners))
    steer_to(2)
    assert spread(listeners) == [0, 0, 60]
    stop_steering()
    assert all(spread(listeners))


def test_every_listener_serves_when_the_position_is_taken_by_none(listeners: list[socket.socket]) -> None:
    steer_to(2)
    listeners.pop(0).close()
    assert all(spread(listeners))
    steer_to(1)
    assert spread(listeners) == [60, 0], "the last listener took the place of the closed one"


def test_a_unix_socket_is_left_alone(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        listener.listen()
        steer_to(0)
        stop_steering()
        limit_unread_time(1.0)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("socket")
