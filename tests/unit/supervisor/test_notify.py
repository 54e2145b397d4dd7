from __future__ import annotations

import os
import socket

import pytest

from sie.supervisor.notify import Notifier, SystemdReporter, watchdog_interval_s


@pytest.mark.parametrize("is_abstract", [False, True])
def test_state_arrives_as_one_datagram(tmp_path, is_abstract):
    address = f"@sie-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if is_abstract else address)
        manager.settimeout(60)
        Notifier(address).send("READY=1", "STATUS=serving")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"


def test_nobody_listening_is_no_reason_to_stop(tmp_path):
    Notifier("").send("READY=1")
    Notifier(str(tmp_path / "absent")).send("READY=1")


def test_manager_that_does_not_read_is_not_waited_for(tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        for _ in range(2000):  # far more than a socket queues
            Notifier(address).send("WATCHDOG=1")


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "20000000"}, 5.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}, 5.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_is_fed_four_times_as_often_as_systemd_wants(environ, interval_s):
    assert watchdog_interval_s(environ) == interval_s


class Heard(Notifier):
    def __init__(self) -> None:
        super().__init__("")
        self.lines: list[str] = []

    def send(self, *lines: str) -> None:
        self.lines += lines

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def test_the_watchdog_is_fed_at_its_interval_and_not_without_one():
    heard = Heard()
    systemd = SystemdReporter(heard, 5.0)
    for now_s in (100.0, 102.0, 104.9, 105.0, 109.0):
        systemd.feed_watchdog(now_s)
    assert heard.take() == ["WATCHDOG=1"] * 2
    SystemdReporter(heard, None).feed_watchdog(100.0)
    assert heard.take() == []


def test_systemd_acts_after_the_supervisor_should_have():
    """Last petted at most one interval before the stall counts, which is grace_s before the supervisor's own limit."""
    systemd = SystemdReporter(Heard(), 5.0)
    systemd_waits_s, limit_s = 20.0, 30.0
    assert limit_s - systemd.grace_s - 5.0 + systemd_waits_s >= limit_s


def test_a_status_is_one_line_and_sent_once():
    heard = Heard()
    systemd = SystemdReporter(heard, None)
    systemd.set_status("a\nREADY=1 b")
    systemd.set_status("a\nREADY=1 b")
    assert heard.take() == ["STATUS=a READY=1 b"]


def test_a_reload_before_readiness_does_not_claim_readiness():
    heard = Heard()
    systemd = SystemdReporter(heard, None)
    systemd.reloading(1.0)
    systemd.reloaded()
    assert heard.take() == []
    systemd.ready("serving")
    systemd.reloading(1.5)
    systemd.reloaded()
    assert heard.take() == ["READY=1", "STATUS=serving", "RELOADING=1", "MONOTONIC_USEC=1500000", "READY=1"]
    systemd.stopping("stopping", 40.0)
    systemd.reloading(2.0)
    systemd.reloaded()
    systemd.set_status("serving")
    assert heard.take() == ["STOPPING=1", "STATUS=stopping", "EXTEND_TIMEOUT_USEC=40000000"]


def test_more_time_is_requested_every_few_seconds():
    heard = Heard()
    systemd = SystemdReporter(heard, None)
    for now_s in range(100, 111):
        systemd.extend_timeout(float(now_s))
    assert heard.take() == ["EXTEND_TIMEOUT_USEC=30000000"] * 3
