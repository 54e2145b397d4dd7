"""Forks CPU workers from a process that has imported the libraries, because the imports are most of a worker's start.

The template, `sie.workers.template`, sends `ready` once. For each number of threads and launch record that it gets, it
sends the process id of a worker, or ends if it cannot. The worker is a child of this process: its parent has ended, and this process adopts
orphans meanwhile. Whatever goes wrong with the template, workers are started without it (decisions/086).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from sie.runtime.own_modules import run_module

_PR_SET_CHILD_SUBREAPER: Final = 36
_FORK_TIMEOUT_S: Final = 5.0
"""A fork takes 10 ms of processor time. The supervisor waits for it, as it does for the start of any process."""
_ROOM: Final = " " * 4096
"""Lengthens the template's command line: a worker writes its own over it."""


class TemplateError(Exception):
    """The template cannot fork."""


class Process(Protocol):
    """A child process: `subprocess.Popen` or `Forked`."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        ...

    def wait(self) -> int:
        """Return the exit status when it has ended."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless it is known to have ended."""
        ...


class Forked:
    """A child process that another one forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status (negative: a signal), or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Return the exit status when it has ended."""
        status = self._wait(0)
        assert status is not None
        return status

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, options))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode


class WorkerTemplate:
    """The template process of one server."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the process in the environment of workers with one thread, since it may have no other. Raises OSError."""
        self.is_ready = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fd = theirs.fileno()
            try:
                self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and module
                    [*run_module("sie.workers.template"), str(fd), str(os.getpid()), _ROOM],
                    stdin=subprocess.DEVNULL, env=environment, process_group=0, pass_fds=[fd],
                )  # fmt: skip
            except OSError:
                self._socket.close()
                raise
        self._socket.settimeout(_FORK_TIMEOUT_S)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the template is ready, and when it has ended."""
        return self._socket.fileno()

    def read(self) -> bool:
        """Read what has come: return whether the template is ready, and False if it has ended."""
        with contextlib.suppress(OSError):
            self.is_ready = self._socket.recv(16) == b"ready"
        return self.is_ready

    def fork(self, launch: str, num_threads: int) -> Forked:
        """Return a worker, a child of this process. Raises TemplateError: the template is of no use from then on."""
        try:
            with _adopting():
                self._socket.send(f"{num_threads} {launch}".encode())
                pid = int(self._socket.recv(16))
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises unless it is a child of ours
        except (OSError, ValueError) as error:
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return Forked(pid)

    def close(self) -> None:
        """End the process. Workers run on."""
        self.is_ready = False
        self._socket.close()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Within the block, descendants of this process whose parents end become its children. Raises OSError."""
    _set_subreaper(1)
    try:
        yield
    finally:
        _set_subreaper(0)


def _set_subreaper(value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
