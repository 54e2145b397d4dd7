"""When a worker is killed or hangs, answers are late but not lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil

from tests.conftest import MINILM
from tests.process.harness import WAIT_S, Server, count_fds, eventually, running, start_server
from tests.process.wire import Client, dense_rows, encode, get, stub_rows, total, under_load, wait_no_extents

SEED = 20_001


def settled_fds(server: Server) -> dict[str, int]:
    """Return how many descriptors each process holds once no request is in flight and no client is connected."""
    wait_no_extents(server.port)
    server.wait_no_connections()
    roles = {"supervisor": server.process.pid, "frontend": server.frontends()[0], "worker": server.worker()}
    return {role: count_fds(pid) for role, pid in roles.items()}


def wait_fds(server: Server, most: dict[str, int]) -> None:
    """Wait until these processes hold no more descriptors than before; then one may have been about to close."""

    def is_back() -> bool:
        now = settled_fds(server)
        return all(now[role] <= count for role, count in most.items())

    eventually(is_back, f"descriptors back at {most}")


def test_twenty_kills_of_the_only_worker_under_load_fail_no_request():
    with start_server("--model", "stub/a=stub:dense=16,latency_ms=2") as server:
        encode(server.port, "stub/a", ["warm"])
        baseline = settled_fds(server)
        with under_load(server, "stub/a", 16, seed=SEED) as load:
            for _ in range(20):
                server.kill_worker()
                load.wait_answers(25)
        print(f"{load.num_answered} answered, the slowest in {load.slowest_s:.2f} s")
        eventually(lambda: total(server.port, "sie_worker_restarts_total") == 20, "twenty restarts counted")
        wait_fds(server, baseline)


def test_a_worker_whose_device_is_worn_ends_when_it_is_idle_and_no_request_is_lost():
    with start_server("--model", "stub/a=stub:dense=16,fail=worn,fail_on=WORN", "--test") as server:
        before = server.worker()
        assert encode(server.port, "stub/a", ["WORN"]).status == 200
        eventually(lambda: server.pids("worker") not in ([], [before]), "a successor")
        assert encode(server.port, "stub/a", ["again"]).status == 200
        eventually(lambda: total(server.port, "sie_worker_restarts_total") == 1, "the restart counted")
    assert any("worker-0 ended with status 76" in line for line in server.output.lines)


def test_kills_in_quick_succession_before_the_successor_is_ready_fail_no_request():
    """Deaths before readiness back off, and eat a budget: three are within it."""
    with (
        start_server("--model", "stub/a=stub:dense=16,load_ms=200", "--restart-backoff-s", "0.05") as server,
        under_load(server, "stub/a", 16, seed=SEED + 1) as load,
    ):
        for _ in range(3):
            server.kill_worker()
        load.wait_answers(25)


def test_a_killed_real_model_comes_back_with_the_same_vectors(minilm_directory):
    texts = [[f"text {n} " * n] for n in range(1, 9)]
    with start_server("--model", f"{MINILM}={minilm_directory}", "--dtype", "float32") as server:
        expected = [dense_rows(encode(server.port, MINILM, text)) for text in texts]
        baseline = settled_fds(server)
        stop = threading.Event()
        num_answered = dict.fromkeys(range(0, 8, 2), 0)

        def ask(index: int) -> None:
            with Client(server.port) as client:
                while not stop.is_set():
                    rows = dense_rows(client.encode(MINILM, texts[index]))
                    np.testing.assert_allclose(rows, expected[index], atol=1e-4)
                    num_answered[index] += 1

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(ask, index) for index in num_answered]
            try:
                server.kill_worker()
                before = dict(num_answered)
                eventually(
                    lambda: (
                        any(client.done() for client in clients)  # one that failed
                        or all(num_answered[index] > before[index] + 1 for index in before)
                    ),
                    "answers of the successor for every client",
                )
                eventually(lambda: get(server.port, "/readyz").status == 200, "ready again")
            finally:
                stop.set()
            for client in clients:
                client.result(WAIT_S)
        assert get(server.port, "/healthz").status == 200
        # A library may keep a file or two more or less open from load to load; a leak would grow with every death.
        del baseline["worker"]
        wait_fds(server, baseline)


def test_death_of_one_worker_of_two_moves_its_work_to_the_other():
    with start_server("--model", "stub/a=stub:dense=16,latency_ms=5", "--devices", "cpu:2") as server:
        # It is ready with one of them.
        workers = eventually(lambda: len(pids := server.pids("worker")) == 2 and pids, "two workers")
        with under_load(server, "stub/a", 16, seed=SEED + 2, num_clients=6) as load:
            load.wait_answers(50)
            for victim in workers:
                os.kill(victim, signal.SIGKILL)
                eventually(lambda: total(server.port, "sie_model_loaded") == 1, "the model is still loaded")
                load.wait_answers(50)
                eventually(lambda: len(server.pids("worker")) == 2, "two workers again")
                eventually(lambda: get(server.port, "/readyz").status == 200, "ready")


def test_two_workers_share_the_work():
    """No share is promised: one of them starts later, or has to share its core with another program."""
    with start_server("--model", "stub/a=stub:dense=16,latency_ms=20", "--devices", "cpu:2") as server:

        def steps() -> list[float]:
            return [total(server.port, "sie_step_duration_seconds_count", worker=slot) for slot in ("0", "1")]

        with under_load(server, "stub/a", 16, seed=SEED + 3, num_clients=8):
            eventually(lambda: min(steps()) > 0, "a step of each worker")
            before = steps()
            eventually(
                lambda: all(now >= then + 20 for now, then in zip(steps(), before, strict=True)), "steps of both"
            )


def core_board(server: Server) -> Path:
    """Return the memory in which workers say whether they need their cores, which the supervisor shares with them."""
    for path in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the supervisor has just closed it
            if "sie-cores" in str(path.readlink()):
                return path
    raise AssertionError("the supervisor shares no board of cores")


def needed_cores(board: Path) -> list[bool]:
    """Return which of two workers need their cores."""
    words = memoryview(board.read_bytes()).cast("I")
    return [bool(words[16 * (1 + worker)]) for worker in range(2)]


def worker_of(server: Server, slot: int) -> int:
    """Return the process id of a slot's worker; the ids are in no order, because the kernel begins again at the lowest."""
    (pid,) = (pid for pid in server.pids("worker") if f'"slot":{slot},' in Path(f"/proc/{pid}/cmdline").read_text())
    return pid


def test_a_worker_lends_its_core_while_it_waits_and_a_dead_one_needs_none():
    """Each worker stops itself in its first step.

    The text is so long that this is no hang, and not even late: then the other worker would get the request, too.
    """
    flags = ("--devices", "cpu:2", "--test", "--failpoints", "worker.before_step=stop@1")
    with start_server("--model", "stub/a=stub:dense=16", *flags) as server, ThreadPoolExecutor(1) as pool:
        board = core_board(server)
        eventually(lambda: total(server.port, "sie_worker_up") == 2, "two workers")
        eventually(lambda: needed_cores(board) == [False, False], "two workers that wait")
        answer = pool.submit(encode, server.port, "stub/a", ["x" * 24_000])

        def in_step() -> list[bool]:
            return [is_stopped(worker_of(server, slot)) for slot in range(2)]

        busy = eventually(lambda: any(found := in_step()) and found, "a worker in a step")
        eventually(lambda: needed_cores(board) == busy, "only its core needed")
        other = worker_of(server, busy.index(False))
        os.kill(worker_of(server, busy.index(True)), signal.SIGKILL)
        eventually(lambda: is_stopped(other), "the other worker in the step")
        eventually(lambda: needed_cores(board) == busy[::-1], "only its core needed, and the dead one's lent")
        os.kill(other, signal.SIGCONT)
        assert answer.result(WAIT_S).status == 200
        eventually(lambda: needed_cores(board) == [False, False], "two workers that wait")


def test_a_stopped_worker_is_found_killed_and_replaced():
    """SIGABRT does not reach a stopped process; the SIGKILL after it does."""
    with start_server("--model", "stub/a=stub:dense=16,latency_ms=50", "--watchdog-s", "1") as server:
        stopped = server.worker()
        with under_load(server, "stub/a", 16, seed=SEED + 4) as load:
            os.kill(stopped, signal.SIGSTOP)
            server.log_line("worker-0 hangs")  # how soon it is found is a row of tests/chaos: F5
            eventually(lambda: not running(stopped), "the end of the stopped worker")
            load.wait_answers(25)
        # On a busy machine it may itself be without a core for a second.
        eventually(lambda: server.pids("worker") not in ([], [stopped]), "a successor")


def test_a_worker_that_is_stopped_while_idle_is_found_when_work_comes():
    with start_server("--model", "stub/a=stub:dense=16", "--watchdog-s", "1") as server:
        stopped = server.worker()
        os.kill(stopped, signal.SIGSTOP)
        rows = dense_rows(encode(server.port, "stub/a", ["x"]))
        assert np.array_equal(rows, stub_rows(["x"], 16))
        eventually(lambda: server.pids("worker") not in ([], [stopped]), "a successor")


def test_a_long_step_that_was_allowed_is_not_taken_for_a_hang():
    """Each token of a model that has run nothing yet allows 20 ms, on top of the watchdog's time."""
    text = "x" * 4000
    with start_server("--model", "stub/a=stub:dense=16,latency_ms=4500", "--watchdog-s", "3") as server:
        worker = server.worker()
        assert np.array_equal(dense_rows(encode(server.port, "stub/a", [text])), stub_rows([text], 16))
        assert server.worker() == worker


def test_an_input_that_runs_at_every_death_is_refused_and_its_neighbours_succeed():
    """An abort is what a crash in native code looks like from outside: whatever ran may be to blame.

    Each worker stops itself when it has said what its first step is to run, so that the abort finds it there.
    """
    flags = ("--test", "--failpoints", "worker.before_step=stop@1")
    with start_server("--model", "stub/a=stub:dense=16", *flags) as server, ThreadPoolExecutor(3) as pool:
        poison = pool.submit(encode, server.port, "stub/a", ["poison"])
        abort_worker(server)
        stopped_worker(server)  # it runs the same again
        assert not poison.done(), "one death proves nothing"
        neighbours = [pool.submit(encode, server.port, "stub/a", [text]) for text in ("b", "c")]
        wait_in_flight(server, 3)
        abort_worker(server)
        refusal = poison.result(WAIT_S)
        assert (refusal.status, refusal.code()) == (422, "POISON_INPUT"), refusal
        worker = stopped_worker(server)
        os.kill(worker, signal.SIGCONT)
        for neighbour, text in zip(neighbours, ("b", "c"), strict=True):
            assert np.array_equal(dense_rows(neighbour.result(WAIT_S)), stub_rows([text], 16))
        assert encode(server.port, "stub/a", ["poison"]).status == 422
        assert server.worker() == worker
        assert get(server.port, "/v1/models/stub/a").json()["state"] == "loaded"


def wait_in_flight(server: Server, num_requests: int) -> None:
    eventually(
        lambda: total(server.port, "sie_extents_in_use", segment="request") == num_requests,
        f"{num_requests} requests in flight",
    )


def stopped_worker(server: Server) -> int:
    """Wait until the only worker has stopped itself in a step; return its process id."""

    def pid() -> int:
        pids = server.pids("worker")
        return pids[0] if len(pids) == 1 and is_stopped(pids[0]) else 0

    return eventually(pid, "a worker in its first step")


def is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def abort_worker(server: Server) -> None:
    """SIGABRT the only worker in the step in which it stopped, and wait until it is gone.

    It is the signal of the thread that runs steps: another thread could take one of the process's, while this one went on.
    """
    pid = stopped_worker(server)
    assert ctypes.CDLL(None).tgkill(pid, pid, int(signal.SIGABRT)) == 0
    os.kill(pid, signal.SIGCONT)
    eventually(lambda: not running(pid), "its end")
