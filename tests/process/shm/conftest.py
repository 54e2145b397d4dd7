from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sie.shm.attach import Attachment
from sie.shm.space import OutboundSpace

_PEER = Path(__file__).with_name("peer.py")
DEADLINE_S = 120.0


class Peers:
    """The processes of one test, each attached to this one; all are dead when the test ends."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, space: OutboundSpace, generation: int, capacity: int, *fuse: str) -> Attachment:
        """Start `peer.py` and return this side of the attachment."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(_PEER), role, str(theirs.fileno()), str(generation), str(capacity), *fuse]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._processes.append(process)
        pidfd = os.pidfd_open(process.pid)
        return Attachment.connect(ours, pidfd, generation, space, capacity, timeout_s=DEADLINE_S)

    def wait(self) -> int:
        """Return the exit status of the peer that was started last: negative for a signal."""
        return self._processes[-1].wait(DEADLINE_S)

    @staticmethod
    def wait_readable(*fds: int) -> set[int]:
        """Return those of fds that are readable, at least one; fail at the deadline."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(DEADLINE_S * 1000)}
        assert ready, f"nothing happened for {DEADLINE_S} s"
        return ready

    def kill(self) -> None:
        self._processes[-1].send_signal(signal.SIGKILL)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(DEADLINE_S)


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


@pytest.fixture(scope="session")
def peer() -> ModuleType:
    """The functions that both processes use."""
    spec = importlib.util.spec_from_file_location("shm_test_peer", _PEER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def new_fds() -> Callable[[], set[tuple[str, str]]]:
    """Return what lists the descriptors opened since, after what only a caught traceback still holds has gone.

    Those that were open before are no concern of a test: a thread of another's client may close one late.
    """
    gc.collect()
    before = _open_fds()

    def opened() -> set[tuple[str, str]]:
        gc.collect()
        return _open_fds() - before

    return opened


def _open_fds() -> set[tuple[str, str]]:
    """Return the number and the target of each open descriptor."""
    found: set[tuple[str, str]] = set()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  # one system call, no directory left open
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))  # noqa: PTH115
    return found
