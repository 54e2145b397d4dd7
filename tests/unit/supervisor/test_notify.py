from __future__ import annotations

import os
import socket

import pytest

from sie.supervisor.notify import Notifier, watchdog_interval_s


@pytest.mark.parametrize("is_abstract", [False, True])
def test_state_arrives_as_one_datagram(tmp_path, is_abstract):
    address = f"@sie-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if is_abstract else address)
        manager.settimeout(5)
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
        ({"WATCHDOG_USEC": "20000000"}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_is_petted_twice_as_often_as_systemd_wants(environ, interval_s):
    assert watchdog_interval_s(environ) == interval_s
