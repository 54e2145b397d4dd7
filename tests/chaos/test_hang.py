"""F5, F6, F36, F56: a worker that hangs is found in time, and a slow one is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import onnx_models
from tests.chaos.cluster import MODEL, Leaks, cluster, kill, logged
from tests.chaos.control_group import control_group
from tests.chaos.history import open_loop
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import Server, eventually, paused, running
from tests.process.wire import dense_rows, encode, extents_in_use, post_json, total

WATCHDOG_S = 1.0
LATE_S = 1.0
"""Over its step's allowance by so much, a worker is late (`sie.supervisor.hang_detector`)."""
FOUND_S = WATCHDOG_S + 0.5
STEP_S = 2.0
"""A step that is still under way when it is stopped, though the test came late to that."""
STEP = f"latency_ms={STEP_S * 1000:g}"


def num_restarts(server: Server) -> float:
    return total(server.port, "sie_worker_restarts_total")


def hang_and_find(server: Server, victim: int) -> float:
    """Stop a worker; return the seconds until it was found. Its successor serves on return."""
    num_lines = len(server.output.lines)
    began_s = time.monotonic()
    kill(victim, signal.SIGSTOP)
    eventually(lambda: logged(server, "hangs: its step", num_lines), "a hang to be found")
    found_s = time.monotonic() - began_s
    eventually(lambda: not running(victim), "the end of the stopped worker")
    eventually(lambda: logged(server, "loaded: cpu", num_lines), "a successor that serves")
    return found_s


@pytest.mark.row("F5", "a worker hangs: it is stopped, or spins in a step")
@pytest.mark.timeout(600)
@pytest.mark.timing
def test_f5_a_hung_worker_is_found_within_its_watchdog(row: Row):
    with cluster("--watchdog-s", f"{WATCHDOG_S:g}") as server:
        leaks = Leaks(server)
        with open_loop(server, 50, seed=SEED) as load:
            found_s = [hang_and_find(server, server.pids("worker")[n % 2]) for n in range(pick(2, 20))]
        leaks.check()
    row.at_most("slowest finding", max(found_s), FOUND_S, "s")
    row.all_right("failed requests", load.history)
    row.at_most("slowest answer", max(load.history.latencies_s()), FOUND_S + 2.0, "s")


@pytest.mark.row("F5", "a worker is stopped and goes on later: another answers its requests, long before its watchdog")
@pytest.mark.timing
def test_f5_requests_of_a_stopped_worker_are_answered_by_another(row: Row):
    with cluster("--watchdog-s", "60") as server:
        leaks = Leaks(server)
        with open_loop(server, 50, seed=SEED) as load:
            for victim in server.pids("worker")[: pick(1, 2)]:
                num_lines = len(server.output.lines)
                with paused(victim):
                    eventually(lambda: logged(server, "is late", num_lines), "word of a late worker")  # noqa: B023
                    time.sleep(LATE_S)
                eventually(lambda: logged(server, "is no longer late", num_lines), "word of its return")  # noqa: B023
        leaks.check()
        restarts = num_restarts(server)
    row.all_right("failed requests", load.history)
    row.at_most("slowest answer", max(load.history.latencies_s()), LATE_S + 1.0, "s")
    row.equals("workers killed", restarts, 0)


@pytest.mark.row("F5", "a worker is stopped in a step, and its successor again: the input is not to blame")
@pytest.mark.timing
def test_f5_an_input_whose_workers_were_stopped_is_answered(row: Row):
    with cluster("--watchdog-s", f"{STEP_S + 0.5:g}", stub=STEP, frontends=1, workers=1, is_warm=False) as server:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(encode, server.port, MODEL, ["innocent"])
            for _ in range(2):
                eventually(lambda: extents_in_use(server.port), "the request on its way")
                time.sleep(0.2)  # well within its step
                hang_and_find(server, server.worker())
            status = answer.result(60.0).status
        restarts = num_restarts(server)
    row.equals("status of the innocent input", status, 200)
    row.equals("workers killed", restarts, 2)


@pytest.mark.row(
    "F5", "a worker's control group is frozen in a step, and its successor's again: the input is not to blame"
)
@pytest.mark.timing
def test_f5_an_input_whose_workers_were_frozen_is_answered(row: Row):
    with (
        control_group("freezer") as group,
        cluster("--watchdog-s", f"{STEP_S + 0.5:g}", stub=STEP, frontends=1, workers=1, is_warm=False) as server,
    ):
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(encode, server.port, MODEL, ["innocent"])
            for _ in range(2):
                eventually(lambda: extents_in_use(server.port), "the request on its way")
                time.sleep(0.2)  # well within its step
                num_lines, victim = len(server.output.lines), server.worker()
                group.add(victim)
                group.freeze(is_frozen=True)
                try:
                    eventually(lambda: logged(server, "hangs: its step", num_lines), "a hang to be found")  # noqa: B023
                    time.sleep(1.0)  # it is killed, for its stacks do not come
                finally:
                    group.freeze(is_frozen=False)
                eventually(lambda: not running(victim), "the end of the frozen worker")  # noqa: B023
                eventually(lambda: logged(server, "loaded: cpu", num_lines), "a successor that serves")  # noqa: B023
            status = answer.result(60.0).status
        restarts = num_restarts(server)
    row.equals("status of the innocent input", status, 200)
    row.equals("workers killed", restarts, 2)


@pytest.mark.row("F5", "a step never ends: its worker dumps its stacks, and the input is refused the second time")
@pytest.mark.timing
def test_f5_an_input_that_hangs_every_worker_is_refused(row: Row, tmp_path: Path):
    onnx_models.write(tmp_path, "endless", onnx_models.endless())
    flags = ("--watchdog-s", f"{WATCHDOG_S:g}", "--model-repository", str(tmp_path))
    with cluster(*flags, stub="latency_ms=2,hang_on=HANG") as server:
        with open_loop(server, 50, seed=SEED) as load:
            ones = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
            ended = post_json(server.port, "/v2/models/endless/infer", {"inputs": [ones]})
            row.equals("status of an endless loop in a model", ended.status, 504)
            row.equals("workers lost to it", num_restarts(server), 0)
            began_s = time.monotonic()
            refusal = encode(server.port, MODEL, ["please HANG"])
            took_s = time.monotonic() - began_s
        assert (refusal.status, refusal.code()) == (422, "POISON_INPUT")
        eventually(lambda: num_restarts(server) >= 2, "the loss of two workers, counted")
        restarts = num_restarts(server)
        eventually(
            lambda: any("stub_faults.py" in line and "_hang" in line for line in server.output.lines),
            "a dump of the stacks",
        )
    row.at_least("workers lost", restarts, 2, "")
    row.at_most("workers lost, others that the machine starved included", restarts, 2, "", slack=2.0)
    row.all_right("failed requests of others", load.history)
    row.at_most("time to the refusal", took_s, 2 * FOUND_S + 2.0, "s")


@pytest.mark.row("F6", "a step is long, and within what its tokens allow")
@pytest.mark.timeout(400)
@pytest.mark.timing(forks=True)
def test_f6_a_long_legal_step_kills_nobody(row: Row):
    """A token takes 2 ms: the step takes several times as long as the watchdog alone would let it."""
    num_tokens = pick(2000, 30_000)
    flags = (
        "--watchdog-s",
        f"{pick(2 * WATCHDOG_S, WATCHDOG_S):g}",
        "--request-timeout-s",
        "120",
        "--max-item-text-bytes",
        "1000000",
    )
    with cluster(*flags, stub=f"per_token_us=2000,max_tokens={num_tokens}", frontends=1, workers=1) as server:
        began_s = time.monotonic()
        dense_rows(encode(server.port, MODEL, ["x" * 4 * num_tokens]))
        took_s = time.monotonic() - began_s
        restarts = num_restarts(server)
    row.equals("workers killed", restarts, 0)
    row.at_least("length of the step", took_s, pick(4.0, 60.0), "s")


@pytest.mark.row("F36", "everything is stopped for a while, as in a suspend, and goes on")
@pytest.mark.timing(forks=True)
def test_f36_a_gap_in_time_kills_nobody(row: Row):
    watchdog_s = pick(2 * WATCHDOG_S, WATCHDOG_S)
    with cluster("--watchdog-s", f"{watchdog_s:g}", "--tick-timeout-s", f"{watchdog_s:g}") as server:
        before = sorted(server.pids())
        for _ in range(pick(1, 5)):
            for pid in before:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(pick(1.5, 3.0) * watchdog_s)
            for pid in before:
                os.kill(pid, signal.SIGCONT)
            with open_loop(server, 50, seed=SEED) as load:
                time.sleep(1.5 * watchdog_s)
            row.all_right("failed requests afterwards", load.history)
        after = sorted(server.pids())
    row.equals("processes replaced", len(set(before) ^ set(after)), 0)


@pytest.mark.row("F56", "other programs take all processors")
@pytest.mark.timeout(400)
@pytest.mark.timing(alone=True, forks=True)
def test_f56_starved_of_processors_it_kills_nobody(row: Row):
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        flags = ("--watchdog-s", f"{pick(4.0, WATCHDOG_S):g}", "--tick-timeout-s", f"{pick(6.0, 2.0):g}")
        with cluster(*flags) as server:
            before = sorted(server.pids())
            with open_loop(server, 20, seed=SEED) as load:
                time.sleep(pick(4.0, 60.0))
            after = sorted(server.pids())
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    row.equals("processes replaced", len(set(before) ^ set(after)), 0)
    row.all_right("failed requests", load.history)
