"""The load itself, against a small server on a thread that can stall, refuse and hang up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sie.loadgen.channels import Http1Channel
from sie.loadgen.generator import Call, Generator, RefusedError
from sie.loadgen.target import Target, TargetError, parse_target

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BUSY = b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nfull"
CALLS = [Call(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", ("a",))]
STALL_S = 0.3

Answer = Callable[[int], bytes | None]
"""Number of a request to its answer; None hangs up."""


@contextmanager
def server(answer: Answer) -> Iterator[Target]:
    """Serve one connection after the other."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)

    def serve() -> None:
        count = 0
        while True:
            sock, _ = listener.accept()
            if stopping.is_set():
                sock.close()
                return
            with sock:
                sock.settimeout(60)
                while sock.recv(65536):
                    count += 1
                    reply = answer(count)
                    if reply is None:
                        break
                    sock.sendall(reply)

    stopping = threading.Event()
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield parse_target(f"http://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        stopping.set()
        socket.create_connection(listener.getsockname()).close()
        thread.join(60)
        listener.close()


@contextmanager
def generator(target: Target) -> Iterator[Generator]:
    made = Generator(target, Http1Channel, CALLS)
    try:
        yield made
    finally:
        made.close()


def stall_once(number: int) -> bytes:
    if number == 5:
        time.sleep(STALL_S)
    return OK


def test_a_stall_shows_in_every_request_of_an_open_loop_that_it_delayed():
    with server(stall_once) as target, generator(target) as load:
        run = load.run_open(1, 200, 1.0, poisson=False)
    assert run.num_good == 200
    num_delayed = run.num_good - run.latencies.count_within(int(STALL_S / 2 * 1e9))
    assert num_delayed >= 200 * STALL_S / 2 * 0.9
    assert run.latency_ms(100)[0] >= STALL_S * 1000


def test_the_same_stall_shows_once_in_a_closed_loop():
    with server(stall_once) as target, generator(target) as load:
        run = load.run_closed(1, 0.5)
    num_delayed = run.num_good - run.latencies.count_within(int(STALL_S / 2 * 1e9))
    assert 1 <= num_delayed <= 5  # a busy machine has stalls of its own


def test_a_refusal_is_an_error_by_its_status_with_its_words():
    with server(lambda number: BUSY if number % 2 else OK) as target, generator(target) as load:
        run = load.run_closed(1, 0.1)
    assert 0 <= run.errors["status 503"] - run.num_good <= 1
    assert run.first_error == "status 503: full"


def test_a_connection_that_ends_is_counted_and_replaced():
    with server(lambda number: None if number % 3 == 0 else OK) as target, generator(target) as load:
        run = load.run_open(1, 100, 0.3)
    assert run.errors == {"connection closed": 10}
    assert run.num_good == 20


def test_asking_each_stops_at_a_refusal():
    with server(lambda _: BUSY) as target, generator(target) as load, pytest.raises(RefusedError, match="full"):
        load.ask_each()


def test_a_server_that_is_gone_ends_the_run():
    with generator(parse_target("http://127.0.0.1:1")) as load, pytest.raises(TargetError):
        load.run_closed(1, 0.1)


def test_the_generator_counts_its_own_time():
    with server(lambda _: OK) as target, generator(target) as load:
        run = load.run_closed(1, 0.2)
    assert 0 < run.cpu_s <= run.elapsed_s
