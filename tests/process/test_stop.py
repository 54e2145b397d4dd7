"""SIGTERM finishes accepted requests and refuses new ones; a second one does not wait."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.process.harness import WAIT_S, Server, eventually, launch, paused, start_server
from tests.process.wire import Client, Response, connect, dense_rows, encode, raw_request, stub_rows, total

SLOW = "stub/a=stub:dense=16,latency_ms=100"
ENDLESS = "stub/a=stub:dense=16,latency_ms=3600000"
"""Its step takes far longer than a test waits for anything."""


@pytest.mark.timing
def test_an_idle_server_stops_at_once():
    with start_server("--model", "stub/a=stub:dense=16") as server:
        began_s = time.monotonic()
        server.stop()
        assert time.monotonic() - began_s < 15, "it waited for something"


STOPPED_EARLY = """
import signal, sys
from sie.commands import cli
from sie.supervisor import main as supervisor
real = getattr(supervisor, sys.argv[1])
def stopped(*args, **kwargs):
    signal.raise_signal(signal.SIGTERM)
    return real(*args, **kwargs)
setattr(supervisor, sys.argv[1], stopped)
sys.exit(cli.main(["serve", "--model", "stub/a=stub:dense=16", "--port", "0", "--runtime-dir", sys.argv[2]]))
"""


@pytest.mark.parametrize("place", ["take_lock", "resolve_devices", "Supervisor"])
def test_a_stop_before_the_signal_handlers_leaves_nothing(tmp_path: Path, place: str):
    """Each place is a function that a start calls after it has made its directory."""
    command = [sys.executable, "-c", STOPPED_EARLY, place, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, list(tmp_path.glob("run-*"))) == (0, [])
    assert "Traceback" not in done.stderr


@pytest.mark.timing
def test_an_idle_connection_does_not_delay_the_stop():
    with start_server("--model", "stub/a=stub:dense=16") as server, Client(server.port) as client:
        assert client.request("GET", "/healthz").status == 200
        began_s = time.monotonic()
        server.stop()
        assert time.monotonic() - began_s < 15, "it waited for the connection"


def test_an_answer_that_is_read_slowly_is_not_cut_by_a_stop():
    """Its last byte leaves long after the server's last work for it."""
    flags = ("--model", "stub/wide=stub:dense=65536", "--drain-timeout-s", "100")
    with start_server(*flags) as server, connect(server.port) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        body = msgspec.msgpack.encode({"items": [{"text": f"text {n}"} for n in range(60)]})
        sock.sendall(raw_request("/v1/encode/stub/wide", body, {"content-type": "application/msgpack"}))
        assert sock.recv(1, socket.MSG_PEEK) == b"H"
        server.process.send_signal(signal.SIGTERM)
        server.log_line("SIGTERM")
        parsed = http.client.HTTPResponse(sock, method="POST")
        parsed.begin()
        num_left = num_bytes = int(parsed.headers["content-length"])
        began_s = time.monotonic()
        while num_left and (piece := parsed.read(num_bytes // 50)):
            num_left -= len(piece)
            time.sleep(0.1)  # the pace of this client
        assert num_left == 0
        assert time.monotonic() - began_s > 4
        server.stop()


def test_accepted_requests_are_answered_and_new_ones_refused():
    """A connection on which nothing is asked is closed half a second after the signal.

    So it may be where a process stood still. Then another server is stopped.
    """
    for _ in range(5):
        if (refusal := stop_with_four_accepted()) is not None:
            assert (refusal.status, refusal.code(), refusal.headers["connection"]) == (503, "SHUTTING_DOWN", "close")
            return
    pytest.fail("the open connection was closed without a refusal each time")


def stop_with_four_accepted() -> Response | None:
    """Stop a server that has accepted four requests. Return its refusal of another one on an open connection, if it sent one."""
    with (
        start_server("--model", SLOW, "--drain-timeout-s", "100") as server,
        ThreadPoolExecutor(4) as pool,
        Client(server.port) as late,
    ):
        assert late.request("GET", "/healthz").status == 200
        with paused(server.worker()):
            accepted = [pool.submit(encode, server.port, "stub/a", [f"text {n}"]) for n in range(4)]
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") == 4, "four accepted")
            server.process.send_signal(signal.SIGTERM)
            refusal = refused(late)
        server.log_line("SIGTERM")
        for n, answer in enumerate(accepted):
            assert np.array_equal(dense_rows(answer.result(WAIT_S)), stub_rows([f"text {n}"], 16))
        server.stop()
    return refusal


def refused(client: Client) -> Response | None:
    """Ask on an open connection until that is refused; None if it was closed instead."""

    def ask() -> Response | None:
        response = client.encode("stub/a", ["late"], {"x-sie-timeout-ms": "1"})
        return response if response.status == 503 else None

    try:
        return eventually(ask, "a refusal on an open connection")
    except (ConnectionError, http.client.RemoteDisconnected):
        return None


def test_a_stop_under_load_fails_no_accepted_request():
    """A client sees right answers, then 503 or a closed connection: never a wrong or half answer."""
    stop = threading.Event()
    wrong: list[str] = []
    num_right = [0] * 4

    def ask(port: int, index: int) -> None:
        while not stop.is_set():
            try:
                response = encode(port, "stub/a", ["x", str(index)])
            except (ConnectionError, http.client.RemoteDisconnected):  # closed before it was accepted
                continue
            if response.status == 200 and np.array_equal(dense_rows(response), stub_rows(["x", str(index)], 16)):
                num_right[index] += 1
            elif response.status != 503 or response.code() != "SHUTTING_DOWN":
                wrong.append(f"{response.status} {response.body[:200]!r}")

    with start_server("--model", "stub/a=stub:dense=16,latency_ms=20") as server, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask, server.port, index) for index in range(4)]
        try:
            eventually(lambda: all(count >= 5 for count in num_right), "answers for every client")
            server.stop()
        finally:
            stop.set()
        for client in clients:
            client.result(WAIT_S)
    assert not wrong


def test_a_second_signal_stops_at_once():
    with start_server("--model", ENDLESS, "--drain-timeout-s", "3600", is_stopped=True) as server:
        with connect(server.port) as sock:
            sock.sendall(raw_request("/v1/encode/stub/a", b'{"items":[{"text":"x"}]}'))
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") == 1, "one accepted")
            server.process.send_signal(signal.SIGTERM)
            server.log_line("SIGTERM: finishing")
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(WAIT_S)  # the step takes longer
        server.wait_gone(WAIT_S)


def test_work_that_takes_longer_than_the_drain_is_cut():
    with start_server("--model", ENDLESS, "--drain-timeout-s", "0.5", is_stopped=True) as server:
        with connect(server.port) as sock:
            sock.sendall(raw_request("/v1/encode/stub/a", b'{"items":[{"text":"x"}]}'))
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") == 1, "one accepted")
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(WAIT_S)  # the step takes longer
        server.wait_gone(WAIT_S)


def test_a_stop_while_a_worker_is_down_still_answers_what_was_accepted():
    model = "stub/a=stub:dense=16,latency_ms=300,load_ms=500"
    with start_server("--model", model, "--drain-timeout-s", "100") as server, ThreadPoolExecutor(1) as pool:
        with paused(server.worker()):
            accepted = pool.submit(encode, server.port, "stub/a", ["x"])
            eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") == 1, "one accepted")
            server.kill_worker()
        server.stop()
        assert np.array_equal(dense_rows(accepted.result(WAIT_S)), stub_rows(["x"], 16))


# --- Ctrl-C ------------------------------------------------------------------------------------------------------------


def _has_torch(server: Server) -> bool:
    """Return whether a worker has torch: it is about to load, or loads."""
    return any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in server.pids("worker"))


@pytest.mark.parametrize("workers", ["--fork-workers", "--no-fork-workers"])
def test_ctrl_c_during_a_load_is_clean_and_ends_with_one_line(minilm_directory, workers):
    """Libraries that clean up at exit beside a load's thread log from it, or end in std::terminate.

    A forked worker has torch from its first moment and loads in less than a second, so its load may end beside the stop.
    """
    with tempfile.TemporaryDirectory(prefix="sie-test-") as runtime_dir:
        server = launch(workers, "--model", f"m={minilm_directory}", runtime_dir=runtime_dir, is_fresh=True)
        try:
            eventually(lambda: _has_torch(server), "the moment of the load")
            os.killpg(server.process.pid, signal.SIGINT)
            assert server.process.wait(WAIT_S) == 0
            server.wait_gone(WAIT_S)
        finally:
            server.discard()
        lines = [json.loads(line) for line in server.output.text().splitlines()]
    stopping = next(n for n, line in enumerate(lines) if line["message"].startswith("SIGINT: finishing"))
    after = [line for line in lines[stopping + 1 :] if not is_of_load(line)]
    assert [(line["process"], line["message"]) for line in after] == [("supervisor", "stopped")]


def is_of_load(line: dict[str, str]) -> bool:
    """Return whether a line tells how a load goes on, or how the worker has chosen to run the model."""
    is_chosen = line["process"] == "worker-0" and line["level"] == "info" and line["message"].startswith("m: ")
    return is_chosen or line["message"].startswith(("loading: ", "loaded: "))
