"""Starts the processes that are measured in a session of their own, counts their processor time, and ends them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

_STOP_TIMEOUT_S = 40.0
_ROLES = {
    "sie.workers.main": "worker", "sie.frontend.main": "frontend", "sie.frontend.grpc.main": "grpc",
    "sie.agents.host.main": "agent", "sie.workers.template": "template",
}  # fmt: skip


class Program:
    """A running program with everything that it started."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        may_pause: bool = True,
        talks: bool = False,
    ) -> None:
        """Start it. What talks is read line by line; what others print is kept with their errors, or they would stop
        at a full pipe."""
        self._may_pause = may_pause
        self._log: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115  # closed by `stop`
        environment = {**os.environ, **(env or {})}
        self.process = subprocess.Popen(
            command, env=environment, cwd=cwd, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if talks else self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def output(self) -> str:
        """Return what it has written to standard error, and to standard output unless it talks."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def read_line(self, timeout_s: float) -> bytes:
        """Return its next line of standard output. Raises RuntimeError when there is none in time."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            raise RuntimeError(f"no answer from {self.process.args!r}:\n{self.output()[-2000:]}")
        return line

    def write_line(self, line: bytes) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of its processes so far, by role; those of other programs are all `program`."""
        return self._by_role(lambda process: sum(process.cpu_times()[:2]))

    def waited_s(self) -> dict[str, float]:
        """Return how long its threads could run and waited for a core so far, by role. Source: sched-stats.rst."""
        return self._by_role(_waited_s)

    def _by_role(self, measure: Callable[[psutil.Process], float]) -> dict[str, float]:
        found: dict[str, float] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError):
                    role = _role_of(process, root)
                    found[role] = found.get(role, 0.0) + measure(process)
        return found

    def pause(self) -> None:
        """Keep all its processes from running, where it may be: some spin while they wait for work."""
        if self._may_pause:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, and what it started in its session."""
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._signal(signal.SIGKILL)
        self._log.close()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def _waited_s(process: psutil.Process) -> float:
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[1]) for task in tasks) / 1e9


def _role_of(process: psutil.Process, root: psutil.Process) -> str:
    words = process.cmdline()
    for module, role in _ROLES.items():
        if module in words:
            return role
    return "supervisor" if process.pid == root.pid and "sie" in words else "program"
