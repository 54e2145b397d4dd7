"""The messages to the service manager: when, in which order, and which ones stop when a process hangs."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
from datetime import datetime

import psutil
import pytest

from tests.process.harness import Server, eventually, launch, start_server
from tests.process.notify_socket import ServiceManager
from tests.process.wire import Client, encode

STUB = ("--model", "stub/a=stub:dense=16")


def at_s(log_line: str) -> float:
    """Return the Unix time of a log line."""
    return datetime.fromisoformat(json.loads(log_line)["time"]).timestamp()


def test_a_long_load_asks_for_time_and_readiness_comes_when_requests_are_answered(tmp_path):
    with ServiceManager() as manager:
        server = launch("--model", "stub/a=stub:dense=16,load_ms=8000", runtime_dir=str(tmp_path), env=manager.env)
        try:
            loading = manager.wait_for("STATUS", "not loaded: stub/a")
            ready = manager.wait_for("READY")
            server.wait_ready()
            assert encode(server.port, "stub/a", ["x"]).status == 200
            asked = [note for note in manager.named("EXTEND_TIMEOUT_USEC") if note.at_s < ready.at_s]
            assert len(asked) >= 2
            assert all(int(note.value) >= 10_000_000 for note in asked)
            assert loading.at_s < ready.at_s
            assert server.url in manager.wait_for("STATUS", "serving on").value
            server.stop()
            assert len(manager.named("READY")) == 1
        finally:
            server.discard()


def test_a_stop_says_so_with_the_time_it_may_take_and_is_the_last_word():
    with (
        ServiceManager(watchdog_s=2) as manager,
        start_server(*STUB, "--drain-timeout-s", "300", env=manager.env) as server,
    ):
        manager.wait_for("READY")
        server.process.send_signal(signal.SIGTERM)
        stopping = manager.wait_for("STOPPING")
        extended = manager.wait_for("EXTEND_TIMEOUT_USEC", after_s=stopping.at_s - 1e-6)
        assert int(extended.value) > 300_000_000
        server.stop()
        later = [note for note in manager.notes if note.at_s > stopping.at_s and note.name in ("READY", "STATUS")]
        assert [note.value for note in later if "stopping" not in note.value] == []


def fed_while_silent(manager: ServiceManager, name: str, end_s: float) -> int:
    """Count how often the watchdog was fed between the word that a process does not answer and its end.

    By the order of what was sent, whatever time lies between.
    """
    manager.wait_for("WATCHDOG", after_s=end_s)  # so that all before that were read
    before = [note for note in list(manager.notes) if note.at_s < end_s]
    said = [i for i, note in enumerate(before) if note.name == "STATUS" and f"not answering: {name}" in note.value]
    return sum(note.name == "WATCHDOG" for note in before[said[-1] :])


@pytest.mark.timing(forks=True)
def test_the_watchdog_is_fed_well_within_its_time():
    with ServiceManager(watchdog_s=3) as manager, start_server(*STUB, env=manager.env):
        eventually(lambda: len(manager.named("WATCHDOG")) >= 5, "the watchdog's food")
        times = [note.at_s for note in manager.named("WATCHDOG")]
        assert min(later - earlier for earlier, later in itertools.pairwise(times)) < 1.5


def test_a_hung_worker_starves_the_watchdog_until_it_is_replaced():
    with ServiceManager(watchdog_s=2) as manager, start_server(*STUB, "--watchdog-s", "2", env=manager.env) as server:
        manager.wait_for("WATCHDOG")
        os.kill(server.worker(), signal.SIGSTOP)
        assert manager.wait_for("STATUS", "not answering: worker-0")
        server.log_line("worker-0 hangs")
        ended_s = at_s(server.log_line("worker-0 ended"))
        assert fed_while_silent(manager, "worker-0", ended_s) == 0  # half a second apart otherwise
        assert_serves_again(server, manager, ended_s)


def test_a_hung_frontend_starves_the_watchdog_until_it_is_replaced():
    with (
        ServiceManager(watchdog_s=2) as manager,
        start_server(*STUB, "--frontends", "1", "--tick-timeout-s", "2", env=manager.env) as server,
    ):
        manager.wait_for("WATCHDOG")
        (frontend,) = server.frontends()
        os.kill(frontend, signal.SIGSTOP)
        assert manager.wait_for("STATUS", "not answering: frontend-0")
        killed_s = at_s(server.log_line("frontend-0 did not answer"))
        assert fed_while_silent(manager, "frontend-0", killed_s) == 0
        assert_serves_again(server, manager, killed_s)


def assert_serves_again(server: Server, manager: ServiceManager, since_s: float) -> None:
    manager.wait_for("WATCHDOG", after_s=since_s)
    eventually(lambda: answers(server.port), "an answer")
    eventually(
        lambda: manager.named("STATUS")[-1].value == f"serving on {server.url}, models loaded: 1", "a calm status"
    )


def answers(port: int) -> bool:
    try:
        with Client(port) as client:
            return client.encode("stub/a", ["x"]).status == 200
    except (OSError, http.client.HTTPException):
        return False


def test_a_stopped_supervisor_does_not_feed_the_watchdog():
    with ServiceManager(watchdog_s=1) as manager, start_server(*STUB, env=manager.env) as server:
        manager.wait_for("WATCHDOG")
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            eventually(lambda: psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED, "the stop")
            stopped_s = manager.named("WATCHDOG")[-1].at_s
            eventually(lambda: answers(server.port), "an answer")  # the frontends do not need it
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        manager.wait_for("WATCHDOG", after_s=stopped_s)
