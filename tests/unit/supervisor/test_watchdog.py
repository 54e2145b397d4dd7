"""The supervisor's watchdog. Stand-ins for children record how they are ended."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from sie.config import sections
from sie.shm.inflight import InflightStatus
from sie.supervisor.watchdog import Watchdog

SETTINGS = sections.Supervisor(tick_timeout_s=2.0, start_timeout_s=60.0, watchdog_s=5.0)


class Process:
    def __init__(self, name: str, state: str) -> None:
        self.name, self.state, self.slot = name, state, 0
        self.started_s = self.pong_s = 100.0
        self.is_late = False
        self.ends: list[str] = []

    def kill(self) -> None:
        self.ends.append("kill")

    def kill_as_faulty(self) -> None:
        self.ends.append("fault")

    def signal(self, number: signal.Signals) -> None:
        self.ends.append(number.name)

    def run_state(self) -> tuple[str, float]:
        return "S", 0.0


class Server:
    """One worker and one frontend. The worker's step began at 100 s and was allowed a second."""

    def __init__(self, worker: str = "ready", frontend: str = "ready") -> None:
        self.worker, self.frontend = Process("worker-0", worker), Process("frontend-0", frontend)
        self.late: list[bool] = []
        status = InflightStatus(1, 100_000_000_000, 1_000_000_000, "step", [])
        attachments = SimpleNamespace(
            running=lambda _worker: status, set_late=lambda _worker, *, is_late: self.late.append(is_late)
        )
        self.children: Any = SimpleNamespace(
            workers=[self.worker], frontends=[self.frontend], agents=[], attachments=attachments,
            is_stopping=False, is_draining=False,
        )  # fmt: skip
        self.watchdog = Watchdog(SETTINGS, self.children)

    def run(self, seconds: float) -> None:
        """Tick five times a second from 100 s on."""
        self.watchdog.start(100.0)
        for tick in range(1, int(seconds * 5) + 1):
            self.watchdog.tick(100.0 + tick / 5)


def test_worker_over_its_allowance_is_late_then_aborted_then_killed():
    server = Server()
    server.frontend.state = "gone"
    server.run(1.8)
    assert (any(server.late), server.worker.ends) == (False, [])
    server.run(5.0)
    assert (server.late[-1], server.worker.ends) == (True, [])
    server.run(7.0)
    assert server.worker.ends[:2] == ["SIGABRT", "kill"]


def test_frontend_that_does_not_answer_is_killed_and_shown_before():
    server = Server(worker="gone")
    server.run(1.6)
    assert server.frontend.ends == []
    assert server.watchdog.hung(101.6, 0.0) == []
    assert server.watchdog.hung(101.6, 0.6) == ["frontend-0"], "it is killed within the grace"
    server.run(2.2)
    assert server.frontend.ends[0] == "kill"


@pytest.mark.parametrize("kind", ["worker", "frontend"])
def test_process_that_does_not_start_in_time_is_at_fault(kind: str):
    server = Server(worker="starting", frontend="starting")
    server.run(59.8)
    assert getattr(server, kind).ends == []
    server.run(60.4)
    assert getattr(server, kind).ends[0] == "fault"


def test_nobody_is_killed_for_silence_while_the_server_stops():
    server = Server()
    server.children.is_stopping = server.children.is_draining = True
    server.run(30.0)
    assert (server.worker.ends, server.frontend.ends) == ([], [])
