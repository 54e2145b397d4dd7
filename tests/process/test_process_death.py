"""A frontend that dies is replaced while the others serve; a supervisor that dies leaves no process behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.process.harness import WAIT_S, Server, count_fds, eventually, running, start_server
from tests.process.wire import Client, connect, dense_rows, encode, get, samples, stub_rows, wait_no_extents


def test_a_killed_frontend_is_replaced_within_two_seconds_and_the_other_serves():
    with start_server("--model", "stub/a=stub:dense=16", "--frontends", "2") as server, contextlib.ExitStack() as stack:
        eventually(lambda: answers_from_both(server), "both frontends attached to the worker")
        worker = server.worker()
        victim, survivor = server.frontends()
        baseline = count_fds(worker)
        open_clients = [stack.enter_context(Client(server.port)) for _ in range(16)]
        for client in open_clients:
            assert client.request("GET", "/healthz").status == 200
        os.kill(victim, signal.SIGKILL)
        began_s = time.monotonic()
        num_cut = 0
        for client in open_clients:
            try:
                assert np.array_equal(dense_rows(client.encode("stub/a", ["x"])), stub_rows(["x"], 16))
            except (OSError, http.client.HTTPException):
                num_cut += 1
        assert 0 < num_cut < 16, "each frontend had some of the connections"
        eventually(lambda: len(server.frontends()) == 2, "two frontends again")
        assert survivor in server.frontends()
        eventually(lambda: answers_from_both(server), "an answer of each frontend")
        print(f"replaced after {time.monotonic() - began_s:.2f} s")
        assert server.worker() == worker
        wait_no_extents(server.port)
        eventually(lambda: count_fds(worker) <= baseline, f"no more than the {baseline} descriptors of the worker")


def answers_from_both(server) -> bool:
    """Return whether fresh connections reach two frontends, which name themselves in a header."""
    try:
        replies = [encode(server.port, "stub/a", ["x"]) for _ in range(12)]
    except (OSError, http.client.HTTPException):
        return False
    assert all(reply.status == 200 for reply in replies), [reply for reply in replies if reply.status != 200]
    return len({reply.headers["x-sie-runtime-instance"] for reply in replies}) == 2


def test_a_frontend_killed_with_work_in_the_queue_leaves_no_extent_behind():
    with start_server("--model", "stub/a=stub:dense=16,latency_ms=100", "--frontends", "2") as server:
        sockets = [connect(server.port) for _ in range(12)]
        try:
            for sock in sockets:
                sock.sendall(b"POST /v1/encode/stub/a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 24\r\n\r\n"
                             b'{"items":[{"text":"xx"}]}'[:24])  # fmt: skip
            killed = server.frontends()[0]
            os.kill(killed, signal.SIGKILL)
            # Until it is gone, the kernel still gives its listener new connections, which then are reset.
            eventually(lambda: not running(killed), "the end of the killed frontend")
            eventually(lambda: len(server.frontends()) == 2, "two frontends again")
            wait_no_extents(server.port)
        finally:
            for sock in sockets:
                sock.close()
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", ["x"])), stub_rows(["x"], 16))


def test_a_stopped_frontend_is_killed_and_replaced():
    with start_server("--model", "stub/a=stub:dense=16", "--tick-timeout-s", "3") as server:
        (stopped,) = server.frontends()
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: not running(stopped), "the end of the stopped frontend")
        eventually(lambda: server.frontends() and server.frontends() != [stopped], "a successor")
        # On a busy machine it may itself be without a core for as long.
        eventually(lambda: can_encode(server.port), "an answer")


def can_encode(port: int) -> bool:
    try:
        response = encode(port, "stub/a", ["x"])
    except (OSError, http.client.HTTPException):
        return False
    return np.array_equal(dense_rows(response), stub_rows(["x"], 16))


def can_connect(port: int) -> bool:
    try:
        return get(port, "/healthz").status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_no_process_outlives_a_killed_supervisor():
    with start_server(
        "--model", "stub/a=stub:dense=16", "--frontends", "2", "--devices", "cpu:2", is_stopped=True
    ) as server:
        pids = server.pids()
        assert len(pids) >= 1 + 2 * 2 + 2
        server.process.kill()
        server.wait_gone(WAIT_S)


def test_no_process_outlives_a_supervisor_killed_under_load_or_while_it_loads(minilm_directory):
    with start_server(
        "--model", "stub/a=stub:dense=16", "--lazy-model", f"m={minilm_directory}", is_stopped=True
    ) as server:
        assert encode(server.port, "m", ["x"]).status == 503
        with connect(server.port):
            server.process.kill()
            server.wait_gone(WAIT_S)


@pytest.mark.timing
def test_the_shortest_tick_timeout_kills_no_frontend_that_answers():
    """One that the machine let stand still for half as long does not count, so that is looked at again."""
    with start_server("--model", "stub/a=stub:dense=16", "--tick-timeout-s", "0.5") as server:
        for _ in range(10):
            before = eventually(server.frontends, "a frontend")
            if answers_at_once(server, for_s=2.0, within_s=0.25):
                assert server.frontends() == before
                return
    pytest.fail("it never answered at once for 2 s")


def answers_at_once(server: Server, for_s: float, within_s: float) -> bool:
    """Ask for so long; return whether each answer came within within_s."""
    deadline_s = time.monotonic() + for_s
    while time.monotonic() < deadline_s:
        asked_s = time.monotonic()
        try:
            assert encode(server.port, "stub/a", ["x"]).status == 200
        except (OSError, http.client.HTTPException):
            if time.monotonic() - asked_s <= within_s:
                raise
            eventually(lambda: can_connect(server.port), "a listener")
        if time.monotonic() - asked_s > within_s:
            return False
    return True


def test_a_supervisor_that_was_stopped_for_a_while_kills_nobody_when_it_goes_on():
    """It missed every tick of the others; they did not miss one of its."""
    with start_server(
        "--model", "stub/a=stub:dense=16", "--tick-timeout-s", "5", "--watchdog-s", "5"
    ) as server:  # fmt: skip
        before = sorted(server.pids())
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            deadline_s = time.monotonic() + 6.0
            while time.monotonic() < deadline_s:
                assert encode(server.port, "stub/a", ["x"]).status == 200
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        deadline_s = time.monotonic() + 1.5
        while time.monotonic() < deadline_s:
            assert encode(server.port, "stub/a", ["x"]).status == 200
        assert sorted(server.pids()) == before


def test_the_kernel_would_kill_a_worker_before_a_frontend_for_want_of_memory():
    """Requests of a worker run again; connections of a frontend would be lost."""
    with start_server("--model", "stub/a=stub:dense=16") as server:
        scores = {pid: int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in server.pids()}
        workers = set(server.pids("worker"))
        others = {scores[pid] for pid in scores.keys() - workers}
        assert others == {int(Path("/proc/self/oom_score_adj").read_text())}
        assert {scores[pid] for pid in workers} == {min(max(others) + 300, 1000)}


def test_the_port_is_free_for_the_next_server_after_a_kill():
    with start_server("--model", "stub/a=stub:dense=16", is_stopped=True) as first:
        first.process.kill()
        first.wait_gone(WAIT_S)
        with start_server("--model", "stub/a=stub:dense=16", "--port", str(first.port)) as second:
            assert second.port == first.port
            assert encode(second.port, "stub/a", ["x"]).status == 200


def test_counters_never_fall_when_processes_are_killed():
    with start_server("--model", "stub/a=stub:dense=16", "--frontends", "2") as server:
        for n in range(20):
            assert encode(server.port, "stub/a", [f"text {n}"]).status == 200
        key = ("sie_requests_total", (("endpoint", "encode"), ("model", "stub/a"), ("status", "success")))
        eventually(lambda: samples(server.port).get(key) == 20, "each is counted, which is behind its answer")
        before = {key: value for key, value in samples(server.port).items() if is_cumulative(key[0])}
        server.kill_worker()
        victim = server.frontends()[0]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: victim not in server.frontends() and len(server.frontends()) == 2, "a new frontend")
        eventually(lambda: answers_from_both(server), "an answer of each frontend")
        after = samples(server.port)
        fallen = {key: (value, after.get(key)) for key, value in before.items() if after.get(key, -1) < value}
        assert not fallen
        assert after[key] > 20


def is_cumulative(name: str) -> bool:
    return name.endswith(("_total", "_count", "_bucket", "_sum"))
