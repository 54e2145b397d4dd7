"""How much a client has not taken, measured on real connections of this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import sie.frontend.http.backlog as backlog_module
from sie.frontend.http.backlog import Backlog, _parse

LIMIT = 1 << 20
Pair = tuple[socket.socket, socket.socket, str]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Yield the server's end, the client's, which takes little by itself, and the client's address."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        ours, _ = listener.accept()
        with ours:
            ours.setblocking(False)
            host, port = client.getsockname()
            yield ours, client, f"{host}:{port}"


def send(ours: socket.socket, nbytes: int) -> None:
    """Give the kernel what it takes; Granian would keep the rest."""
    try:
        while nbytes > 0:
            nbytes -= ours.send(bytes(min(nbytes, 65536)))
    except BlockingIOError:
        pass


def take(client: socket.socket, nbytes: int) -> None:
    client.settimeout(60)
    while nbytes > 0:
        nbytes -= len(client.recv(min(nbytes, 65536)))


def test_client_that_takes_nothing_is_over_the_limit_and_cut(pair: Pair) -> None:
    ours, client, address = pair
    backlog = Backlog(address, LIMIT)
    handed = 0
    while not backlog.add(65536):
        send(ours, 65536)
        handed += 65536
        assert handed < 3 * LIMIT
    assert LIMIT // 2 <= handed <= 2 * LIMIT
    backlog.cut()
    with pytest.raises(OSError):
        ours.send(b"more")
    client.settimeout(60)
    while client.recv(65536):
        pass  # what the kernel had; then the end


def test_client_that_takes_all_may_be_sent_any_amount(pair: Pair) -> None:
    ours, client, address = pair
    backlog = Backlog(address, LIMIT)
    for _ in range(200):
        send(ours, 16384)
        take(client, 16384)
        assert not backlog.add(16384)


def test_a_large_part_does_not_count_towards_the_limit_of_what_follows(pair: Pair) -> None:
    ours, _, address = pair
    backlog = Backlog(address, LIMIT)
    send(ours, 10 * LIMIT)  # the kernel takes a part of it
    assert not backlog.add(3 * LIMIT)
    handed = 0
    while not backlog.add(65536):
        handed += 65536
        assert handed < 2 * LIMIT
    assert handed >= LIMIT - 65536


def test_small_answers_ask_the_kernel_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = Backlog(pair[2], LIMIT)
    monkeypatch.setattr(Backlog, "_query", None)
    assert not any(backlog.add(1000) for _ in range(500))


def test_address_that_cannot_be_measured_is_never_over_the_limit(pair: Pair) -> None:
    for address in ("", "unix:/run/x", "127.0.0.1:1"):
        backlog = Backlog(address, LIMIT)
        assert not any(backlog.add(LIMIT) for _ in range(5))
        backlog.cut()
    assert pair[0].fileno() >= 0


def test_a_cut_never_meets_the_next_connection_on_the_same_descriptor(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Granian's threads close and accept while this one looks, so the number may be another's before it is used."""
    ours, client, address = pair
    backlog, find_address = Backlog(address, LIMIT), backlog_module._address
    backlog.add(LIMIT)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as other:
        accepted, _ = listener.accept()
        with accepted:

            def close_behind(sock: socket.SocketType) -> Any:
                address = find_address(sock)
                os.dup2(accepted.fileno(), ours.fileno())
                return address

            monkeypatch.setattr(backlog_module, "_address", close_behind)
            backlog.cut()
            accepted.sendall(b"well")
            assert other.recv(4) == b"well"
    client.settimeout(60)
    while client.recv(65536):
        pass


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("::ffff:10.0.0.1:80", ("10.0.0.1", 80)),
        ("localhost", None),
        ("", None),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int] | None) -> None:
    assert _parse(text) == parsed


def test_client_over_ipv6_is_measured() -> None:
    with (
        socket.create_server(("::1", 0), family=socket.AF_INET6) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
    ):
        ours, _ = listener.accept()
        with ours:
            ours.send(bytes(4096))
            backlog = Backlog(f"[::1]:{client.getsockname()[1]}", LIMIT)
            backlog.add(4096)
            backlog.measure()
            assert backlog.num_bytes in {0, 4096}
            assert backlog._fd == ours.fileno()


@pytest.mark.parametrize(("num_bytes", "is_read"), [(1 << 20, True), (8 << 20, False)])
def test_a_large_answer_that_nobody_has_begun_to_send_is_not_taken_for_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, num_bytes: int, is_read: bool
) -> None:
    ours, _, address = pair
    backlog = Backlog(address, 1 << 62)
    backlog.add(num_bytes)
    backlog.measure()
    assert backlog.is_nearly_read == is_read
    send(ours, num_bytes)
    backlog.measure()
    assert not backlog.is_nearly_read
    monkeypatch.setattr(backlog_module, "_measure", lambda _sock: backlog_module.TcpState(0, 0))
    backlog.measure()
    assert backlog.is_nearly_read
