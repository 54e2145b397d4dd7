"""F37, F38, F39: a stop finishes accepted requests, a second one does not wait, and a killed supervisor leaves no
process behind.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.chaos.cluster import MODEL, cluster
from tests.chaos.history import Ask, open_loop
from tests.chaos.ledger import SEED, Row, pick
from tests.process.harness import eventually, free_port, running, start_server
from tests.process.wire import connect, encode, raw_request, total

STOP_S = 3.0


@pytest.mark.row("F37", "SIGTERM under load")
@pytest.mark.timeout(600)
@pytest.mark.timing
def test_f37_a_stop_under_load_fails_no_accepted_request(row: Row):
    num_lost = num_right = 0
    took_s: list[float] = []
    for number in range(pick(2, 20)):
        with (
            cluster(stub="latency_ms=50", is_stopped=True) as server,
            open_loop(server, 100, seed=SEED + number, timeout_s=5.0) as load,
        ):
            time.sleep(1.0)
            began_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30.0) == 0
            took_s.append(time.monotonic() - began_s)
            server.wait_gone(20.0)
        outcomes = load.history.outcomes()
        num_right += outcomes["right"]
        accepted = {"right", "503 SHUTTING_DOWN", "refused: ConnectionRefusedError"}
        lost = [ask for ask in load.history.asks if ask.outcome not in accepted]
        # A connection that waits in the kernel when the listener closes was never accepted: its client hears no answer.
        lost = [ask for ask in lost if not (ask.outcome == "closed" and is_late(ask, began_s))]
        num_lost += len(lost)
    row.equals("accepted requests lost", num_lost, 0)
    row.tell("right answers", num_right, "")
    row.at_most("slowest stop", max(took_s), 5.0, "s")


def is_late(ask: Ask, stop_s: float) -> bool:
    """Return whether a request was sent after a stop, or just before it on a connection that had heard nothing yet."""
    return ask.sent_s > stop_s or (not ask.instance and ask.due_s > stop_s - pick(2.0, 0.0))


@pytest.mark.row("F38", "SIGTERM twice, during a load, and while a worker is down")
@pytest.mark.timeout(400)
@pytest.mark.timing
def test_f38_a_stop_never_hangs(row: Row):
    with cluster(stub="latency_ms=20000", is_stopped=True, is_warm=False) as server, connect(server.port) as sock:
        sock.sendall(raw_request(f"/v1/encode/{MODEL}", b'{"items":[{"text":"x"}]}'))
        eventually(lambda: total(server.port, "sie_extents_in_use", segment="request") == 1, "one accepted")
        server.process.send_signal(signal.SIGTERM)
        server.log_line("SIGTERM: finishing")
        row.at_most("the second signal", until_gone_s(server), STOP_S, "s")
    lazy = "stub/lazy=stub:dense=16,load_ms=30000"
    with start_server("--lazy-model", lazy, is_stopped=True) as server:
        assert encode(server.port, "stub/lazy", ["x"]).status == 503
        row.at_most("during a load", until_gone_s(server), STOP_S, "s")
    with cluster(workers=1, is_stopped=True) as server:
        server.kill_worker()
        row.at_most("while a worker starts", until_gone_s(server), STOP_S, "s")


def until_gone_s(server) -> float:
    """SIGTERM; return the seconds until no process is left."""
    began_s = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(40.0)
    server.wait_gone(20.0)
    return time.monotonic() - began_s


@pytest.mark.row("F39", "the supervisor is killed")
@pytest.mark.timeout(300)
@pytest.mark.timing
def test_f39_a_killed_supervisor_leaves_nobody_and_the_next_start_is_clean(row: Row):
    gone_s: list[float] = []
    port = str(free_port())
    for number in range(pick(2, 20)):
        with (
            cluster("--port", port, is_stopped=True) as server,
            open_loop(server, 50, seed=SEED + number, timeout_s=2.0, probes=False),
        ):
            pids = server.pids()
            time.sleep(0.5)
            began_s = time.monotonic()
            server.process.kill()
            eventually(lambda pids=pids: not any(map(running, pids)), "the end of every process")
            gone_s.append(time.monotonic() - began_s)
    with cluster("--port", port) as server:
        assert str(server.port) == port
    row.equals("kills", len(gone_s), pick(2, 20))
    row.at_most("last orphan gone", max(gone_s), 2.0, "s")
