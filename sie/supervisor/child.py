"""Runs one child process: its command line, its signals, and the descriptors that belong to it. Decides no restarts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Literal

import msgspec

from sie.ipc.channel import Channel
from sie.ipc.messages import Launch, Protocol, Role
from sie.runtime.child_setup import THREAD_VARIABLES
from sie.runtime.own_modules import run_module
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.losses import DeviceLosses
from sie.supervisor.restart import StartHistory
from sie.supervisor.worker_forks import WorkerForks
from sie.supervisor.worker_template import Process
from sie.values.cgroup_paths import cgroup_paths, read_lines

ChildState = Literal["waiting", "starting", "ready", "lost", "gone"]
_MODULES = {"worker": "sie.workers.main", "agent": "sie.agents.host.main"}
_FRONTENDS: dict[Protocol, str] = {
    "http": "sie.frontend.main",
    "grpc": "sie.frontend.grpc.main",
    "nats": "sie.cluster.host.main",
    "gateway": "sie.cluster.gateway.main",
}
"""The module of each kind of frontend, by name: only the process itself imports it."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Child:
    """One slot for a frontend, a worker or the agent process, and the process that currently fills it.

    waiting: no process; one will be started. starting: not ready yet. lost: the worker's device is lost and will be
    tried again later. gone: given up or stopped for good. peer_pid and peer_pidfd refer to the process that shares
    memory: a frontend's Granian child, else the process itself.
    """

    def __init__(self, role: Role, slot: int, place: WorkerSlot, protocol: Protocol = "http") -> None:
        self.role: Role = role
        self.slot = slot
        self.protocol: Protocol = protocol
        """The protocol that a frontend serves."""
        self.place = place
        self.state: ChildState = "waiting"
        self.incarnation = 0
        self.num_restarts = 0
        self.history = StartHistory()
        self.losses = DeviceLosses()
        self.max_step_tokens = 0
        """For a worker; see `Launch`. So is without_graphs."""
        self.without_graphs = False
        self.process: Process | None = None
        self.pidfd = -1
        self.channel: Channel | None = None
        self.peer_pid = 0
        self.peer_pidfd = -1
        self.started_s = 0.0
        self.pong_s = 0.0
        self.is_faulty = False
        self.is_late = False
        """Whether the frontends were told that a worker is late."""
        self.is_retired = False
        """Whether the process was told to exit; its death then triggers no restart."""

    @property
    def name(self) -> str:
        """The slot's name in logs and metrics, such as `frontend-0` or `worker-1`."""
        return f"{self.role}-{self.slot}"

    def start(
        self,
        launch: Launch,
        num_threads: int,
        now_s: float,
        tls_fds: tuple[int, ...] = (),
        forks: WorkerForks | None = None,
    ) -> None:
        """Start the process in its own process group, so that Ctrl-C at a terminal reaches only the supervisor.

        tls_fds: the descriptors behind the paths of a frontend's TLS files. forks: those of workers. Raises OSError.
        """
        self.incarnation = launch.incarnation
        self.started_s = now_s
        self.is_faulty = self.is_retired = self.is_late = False
        record = msgspec.json.encode(launch).decode()
        forked = forks.try_fork(record, num_threads) if forks is not None else None
        self.process = forked or self._spawn(launch, record, num_threads, tls_fds)
        self.state = "starting"
        self.pidfd = os.pidfd_open(self.process.pid)

    def _spawn(self, launch: Launch, record: str, num_threads: int, tls_fds: tuple[int, ...]) -> Process:
        module = _FRONTENDS[self.protocol] if self.role == "frontend" else _MODULES[self.role]
        is_http = self.role == "frontend" and self.protocol in ("http", "gateway")
        inherited = (launch.listen_fd,) if is_http and launch.listen_fd >= 0 else ()
        inherited += tls_fds if self.role == "frontend" else ()
        return subprocess.Popen(  # noqa: S603  # our own interpreter, module and launch record
            [*run_module(module), record],
            stdin=subprocess.DEVNULL, env=child_environment(num_threads), process_group=0, pass_fds=inherited,
        )  # fmt: skip

    def adopt(self, channel: Channel, pid: int) -> None:
        """Attach the control connection that this slot's process opened."""
        self.channel = channel
        self.peer_pid = pid
        self.peer_pidfd = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def run_state(self) -> tuple[str, float]:
        """Return the letter of the process's state and its processor time in seconds. Source: proc_pid_stat(5).

        A process in a frozen control group counts as stopped, which its own state does not tell.
        """
        assert self.process is not None
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has just ended
            return "X", 0.0
        words = text.rpartition(")")[2].split()
        state = "T" if _is_frozen(self.process.pid) else words[0]
        return state, (int(words[11]) + int(words[12])) / _TICKS_PER_S

    def finish(self) -> None:
        """Tell a frontend to finish accepted requests. A starting one has none and ignores SIGTERM, so it is killed."""
        if self.state == "starting":
            self.kill()
        else:
            self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the process and, for a frontend, the Granian child that shares our memory."""
        for pidfd in (self.peer_pidfd, self.pidfd):
            if pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def kill_as_faulty(self) -> None:
        """Kill the process for its own fault, so that its death counts as a failure."""
        self.is_faulty = True
        self.kill()

    def reap(self) -> int:
        """Collect the dead process, close its descriptors, and return its exit status (negative: a signal)."""
        assert self.process is not None
        status = self.process.wait()
        for fd in (self.pidfd, self.peer_pidfd):
            if fd >= 0:
                os.close(fd)
        if self.channel is not None:
            self.channel.close()
        self.process, self.channel, self.pidfd, self.peer_pidfd = None, None, -1, -1
        return status


def _is_frozen(pid: int) -> bool:
    """Return whether a process's control group is frozen, in either version. Source: cgroups(7)."""
    return any(
        "frozen 1" in read_lines(group.path / "cgroup.events")
        if group.is_unified
        else read_lines(group.path / "freezer.state") in (["FREEZING"], ["FROZEN"])
        for group in cgroup_paths("freezer", pid)
    )


def child_environment(num_threads: int) -> dict[str, str]:
    """Return the child's environment. Thread pools must be sized before their libraries are imported.

    OpenMP's threads spin only briefly before they sleep, because workers and frontends share cores. With libgomp's
    default spin count, a busy neighbour made a 4 ms step take 60 ms and more (`bench peers`).
    """
    threads = dict.fromkeys(THREAD_VARIABLES, str(num_threads))
    return {"GOMP_SPINCOUNT": "1000", **os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
