"""Starts servers as forks of a warm process: most of a start's processor time is imports.

Tests with the mark `timing`, unless it has forks=True, and those that ask for it (is_fresh) get the start of a user. So
does a start that a fork cannot be: behind another command, in another folder or with own variables that libraries read
while they are imported.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[2]
_ROOM = "x" * 60_000
_SIE = ("sie.commands.cli", "sie.supervisor.main", "sie.frontend.main", "sie.frontend.grpc.main", "sie.workers.main")
_TORCH = (*_SIE, "torch", "sie.workers.loading.loader", "sie.workers.loading.shared_weights")
_AT_IMPORT = ("GOMP_", "HF_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""How the variables begin that libraries read while they are imported: a fork with others would not be what it seems."""
_SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""torch sets it when a test compiles. Nothing reads it in an import."""


class WarmProcess:
    """A server that is a fork, to its test: what `subprocess.Popen` is to a started one."""

    def __init__(self, pid: int, stderr: IO[str], report: int) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._report = report

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when it has ended. Raises TimeoutExpired."""
        status = self._read(None if timeout is None else timeout * 1000)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("sie", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the warm process has taken its status, and not told it yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout_ms: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._report, select.POLLIN)
            if poller.poll(timeout_ms):
                text = os.read(self._report, 16)
                os.close(self._report)
                assert text, "the warm process ended"
                self.returncode = int(text)
        return self.returncode


class _Warm:
    """One warm process, for starts among the variables that it was made in."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._at_import = _at_import()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.process.warm_server", str(theirs.fileno()), ",".join(modules), _ROOM],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "_ROOM": _ROOM},
                cwd=_ROOT,
            )
        atexit.register(self._close)

    def fits(self) -> bool:
        """Return whether a start here would find what the warm process has found."""
        return _at_import() == self._at_import

    def start(self, command: list[str], environment: dict[str, str]) -> WarmProcess:
        """Start a server."""
        stderr, theirs = os.pipe()
        report, status = os.pipe()
        message = json.dumps([command, environment]).encode()
        socket.send_fds(self._socket, [message], [theirs, status])
        os.close(theirs)
        os.close(status)
        pid = int(self._socket.recv(16))
        return WarmProcess(pid, os.fdopen(stderr, errors="replace"), report)

    def _close(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


_warm: dict[tuple[str, ...], _Warm] = {}
_is_allowed = True


def set_allowed(*, allowed: bool) -> None:
    """Say whether the servers of the next test may be forks."""
    global _is_allowed
    _is_allowed = allowed


def start_warm(command: list[str], variables: dict[str, str]) -> WarmProcess | None:
    """Start a server as a fork, or return None where it would differ from a start. The variables come on top of the test's."""
    if not _is_allowed or Path.cwd() != _ROOT or any(name.startswith(_AT_IMPORT) for name in variables):
        return None
    modules = _TORCH if _has_weights(command) else _SIE
    if modules not in _warm:
        _warm[modules] = _Warm(modules)
    warm = _warm[modules]
    return warm.start(command, {**os.environ, **variables}) if warm.fits() else None


def _has_weights(command: list[str]) -> bool:
    """Return whether the server loads a model that is computed with torch."""
    models = [value for flag, value in itertools.pairwise(command) if flag in ("--model", "--lazy-model")]
    return any("=stub:" not in model for model in models)


def _at_import() -> dict[str, str]:
    variables = ((name, value) for name, value in os.environ.items() if name != _SET_BY_TORCH)
    return {name: value for name, value in variables if name.startswith(_AT_IMPORT)}
