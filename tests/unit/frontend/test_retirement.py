"""A process that is told to finish ends when no request is in flight and no answer is unread, not earlier and not
later.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from sie.frontend import retirement
from sie.frontend.retirement import Leaving


class Gone(Exception):
    """The process has ended."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of what a process does beside its ticks, which have their own."""
    monkeypatch.setattr(retirement, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.fixture(autouse=True)
def stays_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(status: int) -> None:
        assert status == 0
        raise Gone

    monkeypatch.setattr(os, "_exit", leave)


def leaving(is_idle: Callable[[], bool] = lambda: True, *, in_granian: bool = True) -> Leaving:
    return Leaving(is_idle, lambda: None, 25.0, in_granian=in_granian)


def goes_after(end: Leaving, longest_s: int, first_s: int = 0) -> int | None:
    """Tick once a second from first_s on; return the second in which it goes."""
    for second in range(first_s, longest_s + 1):
        try:
            end.tick(1.0 + second)
        except Gone:
            return second
    return None


def test_process_stays_until_it_is_told_to_finish():
    assert goes_after(leaving(), 100) is None


def test_an_idle_process_goes_within_seconds():
    end = leaving()
    end.begin()
    assert goes_after(end, 100) in {1, 2}


def test_what_is_in_flight_is_finished_first():
    num_left = [10]

    def is_idle() -> bool:
        num_left[0] -= 1
        return num_left[0] < 0

    end = leaving(is_idle)
    end.begin()
    assert goes_after(end, 24) in {11, 12}


def test_nothing_keeps_it_until_the_supervisor_would_kill_it():
    end = leaving(lambda: False)
    end.begin()
    assert goes_after(end, 100) in {23, 24}


def test_a_peer_that_reads_is_waited_for():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(5):
            ours.sendall(b"an answer")
        end = leaving()
        end.begin()
        for first_s in range(0, 20, 4):
            assert goes_after(end, first_s + 3, first_s) is None
            assert theirs.recv(9) == b"an answer"
        assert goes_after(end, 30, 20) in {20, 21, 22}


def test_a_peer_that_reads_nothing_is_not_waited_for_until_the_drain_timeout():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"an answer")
        end = leaving()
        end.begin()
        assert goes_after(end, 20) in {9, 10, 11}


def test_a_process_that_serves_by_itself_hears_of_its_end_by_itself():
    end = leaving(in_granian=False)
    end.begin()
    assert goes_after(end, 100) is None


@pytest.mark.parametrize("in_granian", [True, False])
def test_a_limit_of_files_lowered_for_good_is_a_reason_to_end_once(monkeypatch: pytest.MonkeyPatch, in_granian: bool):
    told: list[tuple[int, int]] = []
    closed: list[bool] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    end = Leaving(lambda: False, lambda: closed.append(True), 25.0, in_granian=in_granian)
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft - 1, soft - 1))
    end.tick(2.0)
    end.tick(4.0)
    assert told == [(os.getppid() if in_granian else os.getpid(), signal.SIGTERM)]
    assert closed == [True]
    assert hard >= soft
