"""F9, F20, F21: a device fails permanently, processes cannot be started, the kernel kills a worker for lack of memory."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.cluster import MODEL, Leaks, cluster, count_loads, is_attached, kill, logged
from tests.chaos.control_group import control_group
from tests.chaos.history import History, open_loop, quantile
from tests.chaos.ledger import SEED, Row, pick
from tests.chaos.test_start import refused
from tests.process.harness import WAIT_S, Server, eventually, paused
from tests.process.watchers import first_frame
from tests.process.wire import encode, get, total


def states_shown(server: Server) -> dict[int, str]:
    return {worker["slot"]: worker["state"] for worker in first_frame(server)["workers"]}


@pytest.mark.row("F9", "one of two devices is gone for good, and comes back in the end")
@pytest.mark.timeout(300)
@pytest.mark.timing
def test_f9_a_device_that_is_gone_is_set_aside_and_the_other_serves(row: Row, tmp_path: Path):
    gone, retry_s = tmp_path / "gone", pick(2.0, 20.0)
    with cluster("--device-retry-s", f"{retry_s:g}", stub=f"latency_ms=5,lost_file={gone}") as server:
        leaks = Leaks(server)
        before = total(server.port, "sie_worker_up")
        with open_loop(server, 100, seed=SEED) as load:
            time.sleep(0.5)
            began_s = time.monotonic()
            gone.write_text("0")
            eventually(lambda: total(server.port, "sie_device_lost", worker="0") == 1, "an alert")
            took_s = time.monotonic() - began_s
            # In between it is tried again, which only a long look takes for the end of it.
            eventually(lambda: total(server.port, "sie_worker_up") == before - 1, "one worker fewer in the metric")
            eventually(lambda: states_shown(server) == {0: "lost", 1: "ready"}, "one shown as lost")
            assert get(server.port, "/readyz").status == 200
            time.sleep(max(0.0, min(60.0, 1.5 * retry_s) - took_s))
            tries = total(server.port, "sie_worker_restarts_total", worker="0")
            assert all("status 75" in line for line in server.output.lines if "ended with status" in line)
            num_lines = len(server.output.lines)
            gone.unlink()
            eventually(lambda: count_loads(server, num_lines) >= 1, "the device in use again")
        eventually(lambda: total(server.port, "sie_worker_up") == before, "all workers")
        eventually(lambda: total(server.port, "sie_device_lost") == 0, "the end of the alert")
        leaks.check()
    row.at_most("device taken for gone after", took_s, 5.0, "s")
    row.at_most("tries to start its worker in a minute, the one that waits included", tries, 4, "", slack=1.5)
    row.all_right("failed requests", load.history)
    row.at_most("p99 of requests", quantile(load.history.latencies_s(), 0.99), 1.0, "s")


@pytest.mark.row("F20", "a limit on processes and threads that no server fits into")
@pytest.mark.timeout(400)
@pytest.mark.timing
def test_f20_a_limit_on_processes_is_refused_with_the_number(row: Row):
    with control_group("pids") as group:
        for limit in (3, 12, 24):
            group.limit(limit)
            said = refused(row, f"{limit} processes", prefix=group.prefix)
            assert "processes and threads: a start needs" in said, said
            assert f"pids.max ({limit})" in said, said
            assert "Traceback" not in said, said
        eventually(lambda: not group.usage(), "the last ones to be reaped")
        row.equals("processes left", group.usage(), 0)


@pytest.mark.row("F20", "processes and threads run out while a server runs, and its workers are killed")
@pytest.mark.timeout(400)
def test_f20_a_limit_that_comes_later_costs_no_answer(row: Row):
    with (
        control_group("pids") as group,
        cluster(prefix=group.prefix, stub="latency_ms=5") as server,
        open_loop(server, 50, seed=SEED) as load,
    ):
        group.limit(group.usage() - 1)
        num_lines = len(server.output.lines)
        kill(server.pids("worker")[0])
        eventually(lambda: any("cannot be started" in line for line in server.output.lines[num_lines:]), "an error")
        group.limit(None)
        eventually(lambda: count_loads(server, num_lines) >= 1, "a successor that serves")
    assert not any("Traceback" in line for line in server.output.lines)
    row.all_right("failed requests", load.history)


@pytest.mark.row("F21", "frontends that stand still hold the memory of a dead worker, which its successor needs")
@pytest.mark.timeout(400)
def test_f21_a_successor_takes_no_memory_before_a_frontend_has_let_go_of_the_dead_one_s(row: Row):
    with control_group("memory") as group, cluster(prefix=group.prefix, workers=1) as server:
        group.limit(group.usage() + (48 << 20))  # each of two frontends maps 32 MiB of replies: not twice
        num_lines = len(server.output.lines)
        with contextlib.ExitStack() as stack:
            for pid in server.frontends():
                stack.enter_context(paused(pid))
            kill(server.worker())
            eventually(lambda: count_loads(server, num_lines) >= 1, "a successor that has the model")
        eventually(lambda: is_attached(server), "a successor that shares memory with both frontends")
        answers = [encode(server.port, MODEL, [f"again {number}"]).status for number in range(16)]
        assert not logged(server, "has to wait", num_lines)
    row.equals("answers of both frontends", answers.count(200), len(answers))


@pytest.mark.row("F21", "the kernel kills a program of another container, and somebody a worker of ours")
@pytest.mark.timeout(400)
def test_f21_a_kill_in_another_group_is_no_want_of_memory_of_ours(row: Row):
    hog = f"b = bytearray({64 << 20})"
    with control_group("memory") as group, cluster(workers=1) as server:
        group.limit(32 << 20)
        num_lines = len(server.output.lines)
        with open_loop(server, 50, seed=SEED) as load:
            for _ in range(2):
                hogged = subprocess.run([*group.prefix, sys.executable, "-c", hog], check=False, timeout=WAIT_S)
                assert hogged.returncode == -signal.SIGKILL
                loads = count_loads(server)
                kill(server.worker())
                eventually(lambda loads=loads: count_loads(server) > loads, "a successor that has the model")
        assert not logged(server, "lack of memory", num_lines)
    row.all_right("failed requests", load.history)


@pytest.mark.row("F21", "the kernel kills a worker for want of memory, whose steps are too large")
@pytest.mark.timeout(400)
@pytest.mark.timing
def test_f21_steps_get_smaller_after_a_kill_for_want_of_memory(row: Row):
    """A token takes 512 KiB while it runs, and the group leaves 128 MiB: a step of over 256 tokens kills its worker.

    A crowd gathers before a worker that stands still, so that its first step is as large as steps get, 1,024 tokens. The
    steps of a successor's successor have 64 at most, and half of what is left then is for what processes hold on to. They
    are slow where memory is short, and a crowd has over 4,000 tokens: the requests have a minute.
    """
    stub = "latency_ms=20,kib_per_token=512"
    crowds: list[History] = []
    with control_group("memory") as group, cluster(prefix=group.prefix, stub=stub, workers=1) as server:
        leaks = Leaks(server)
        group.limit(group.usage() + (128 << 20))
        for number in range(pick(2, 6)):
            with (
                open_loop(server, 300, seed=SEED + number, max_items=6, timeout_s=60.0) as crowd,
                paused(server.worker()),
            ):
                time.sleep(0.4)
            crowds.append(crowd.history)
        explained = sum("killed for lack of memory" in line for line in server.output.lines)
        kills = sum("ended with status -9" in line for line in server.output.lines)
        leaks.check()
    row.tell("requests", sum(len(history.asks) for history in crowds), "")
    row.all_right("failed requests", *crowds)
    row.at_least("kills for want of memory", explained, 1, "")
    row.at_most("kills in all", kills, 4, "", slack=1.0)
