"""A running server for tests: started by a user's command line, watched from outside, and stopped without a trace.

Nothing here imports the server: it is a command line, a log on stderr, a port and some processes. Where no time is
measured, these are forks of a warm process (`warm_start.py`), because the imports of a start take most of its time.
Every wait has a deadline, and a failed one shows what the server wrote.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from tests.process.warm_start import WarmProcess, start_warm

STOP_TIMEOUT_S = 120.0
WAIT_S = 120.0
"""How long a state is waited for: longer than a busy machine may stand still, and within a test's time.

Tests at idle priority get no processor while another program wants all; only a test that fails waits to the end.
"""
EX_CONFIG = 78
DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""What servers run on unless a test says otherwise: cpu, or cuda."""
START_TIMEOUT_S = 120.0 if DEVICE == "cpu" else 240.0
"""A first load on a GPU compiles kernels."""
_SCRAPE_S = 10.0
_EXTENTS = re.compile(rb"^sie_extents_in_use(?:{[^}]*})? (\S+)$", re.MULTILINE)
_LATE = re.compile(r"is late:|is no longer late")
_MARK = "TEST_SERVER_MARK"
_MODULES = {
    "worker": "sie.workers.main",
    "frontend": "sie.frontend.main",
    "grpc": "sie.frontend.grpc.main",
    "puller": "sie.cluster.host.main",
    "gateway": "sie.cluster.gateway.main",
    "supervisor": "serve",
    "template": "sie.workers.template",
}

Role = Literal["worker", "frontend", "grpc", "puller", "gateway", "supervisor", "template"]


_is_timed = False
_WEIGHTS = str(Path(__file__).resolve().parents[2] / "build" / "weights")


def set_timed(*, timed: bool) -> None:
    """Say whether the next test measures time: its servers then have no patience that a user's have not."""
    global _is_timed
    _is_timed = timed


def is_timed() -> bool:
    """Return whether the test measures time. One that does not may run at idle priority, and stand still for long."""
    return _is_timed


def devices(num_workers: int) -> str:
    """Return the setting `devices` for so many workers on DEVICE."""
    return f"cpu:{num_workers}" if DEVICE == "cpu" else ",".join(f"cuda:{index}" for index in range(num_workers))


def eventually(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Return the first true value of `condition`, asked every 10 ms; fail with `what` when time is up.

    After a second it is asked every 40 ms, and a look is followed by a pause of at least its own length: a look at
    processes or a page takes some milliseconds of a core that others wait for.
    """
    began_s = looked_s = time.monotonic()
    while not (value := condition()):
        now_s = time.monotonic()
        assert now_s - began_s < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(max(0.01 if now_s - began_s < 1 else 0.04, min(now_s - looked_s, 0.1)))
        looked_s = time.monotonic()
    return value


def running(pid: int) -> bool:
    """Return whether a process runs; one that only waits to be reaped does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """Have a process stand still until the block ends, so that what it is given stays where it is, for however long."""
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, f"process {pid} stopped")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def count_fds(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


class Output:
    """What a process writes, line by line, for as long as it writes."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: list[str] = []
        self._stream = stream
        self._grew = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return everything so far."""
        return "".join(self.lines)

    def find(self, part: str, timeout_s: float, is_over: Callable[[], bool]) -> str:
        """Return the first line that holds `part`; fail when `is_over` or time is up before it came."""
        deadline_s = time.monotonic() + timeout_s
        with self._grew:
            while True:
                for line in self.lines:
                    if part in line:
                        return line
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"no {part!r} within {timeout_s:g} s:\n{self.text()}"
                assert not is_over() or self._thread.is_alive(), f"ended before {part!r}:\n{self.text()}"
                self._grew.wait(min(left_s, 0.1))

    def close(self) -> None:
        """Wait for the end of the stream; only after the process is gone."""
        self._thread.join(WAIT_S)
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            with self._grew:
                self.lines.append(line)
                self._grew.notify_all()


class Server:
    """One running `sie serve`. Its processes carry a mark in their environment, so that none can hide."""

    def __init__(self, process: subprocess.Popen[str] | WarmProcess, mark: str) -> None:
        assert process.stderr is not None
        self.process = process
        self.output = Output(process.stderr)
        self.port = 0
        self.grpc_port = 0
        self._mark = f"{_MARK}={mark}".encode()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the log line that says where it answers, and remember the port (0 of a Unix socket), and gRPC's."""
        line = self.output.find("ready on ", timeout_s, lambda: self.process.poll() is not None)
        url = json.loads(line)["message"].split("ready on ")[1].split()[0]
        self.grpc_port = (
            int(line.partition("grpc")[2].partition(" ")[0].rpartition(":")[2]) if " and grpc" in line else 0
        )
        self.port = 0 if url.startswith("unix:") else int(url.rpartition(":")[2])

    def log_line(self, part: str, timeout_s: float = WAIT_S) -> str:
        """Return the first log line that holds `part`, waiting for it."""
        return self.output.find(part, timeout_s, lambda: self.process.poll() is not None)

    def complaints(self) -> list[str]:
        """Return the lines of warnings and errors, without those about a late worker: a busy machine makes it late."""
        levels = ('"level":"warning"', '"level":"error"')
        return [line for line in self.output.lines if any(map(line.__contains__, levels)) and not _LATE.search(line)]

    def pids(self, role: Role | None = None) -> list[int]:
        """Return the running processes of one role, or all; a frontend's Granian child is a frontend, too."""
        return [pid for pid, words in self._processes() if role is None or _MODULES[role].encode() in words]

    def _processes(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield each running process with the words of its command line.

        Tests look again and again, and psutil takes six times as long. A process that only waits to be reaped has no
        environment any more.
        """
        for name in os.listdir("/proc"):  # noqa: PTH208  # a path for each takes longer than the rest
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if self._mark in Path("/proc", name, "environ").read_bytes():
                        yield int(name), Path("/proc", name, "cmdline").read_bytes().rstrip(b"\0").split(b"\0")

    def worker(self) -> int:
        """Return the process id of the only worker."""
        (pid,) = self.pids("worker")
        return pid

    def frontends(self) -> list[int]:
        """Return the processes that answer HTTP: Granian's children, whose parents are the slots."""
        modules = {_MODULES["frontend"].encode(), _MODULES["gateway"].encode()}
        pids = {pid for pid, words in self._processes() if not modules.isdisjoint(words)}
        found: list[int] = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended since
                if psutil.Process(pid).ppid() in pids:
                    found.append(pid)
        return sorted(found)

    def wait_no_connections(self, timeout_s: float = WAIT_S) -> None:
        """Wait until no frontend holds a connection: one that its client has closed is there for a moment more."""
        eventually(
            lambda: all(
                connection.status == psutil.CONN_LISTEN
                for pid in self.frontends()
                for connection in psutil.Process(pid).net_connections("tcp")
            ),
            "no connection open",
            timeout_s,
        )

    def kill_worker(self, timeout_s: float = WAIT_S) -> None:
        """SIGKILL the only worker and wait until a successor has been started."""
        dead = self.worker()
        os.kill(dead, signal.SIGKILL)
        eventually(
            lambda: [pid for pid in self.pids("worker") if pid != dead], f"a successor of worker {dead}", timeout_s
        )

    def wait_gone(self, timeout_s: float) -> None:
        """Wait until no process of this server runs."""
        try:
            eventually(lambda: not self.pids(), "the end of every process", timeout_s)
        except AssertionError as error:
            left = [" ".join(psutil.Process(pid).cmdline()[:4]) for pid in self.pids()]
            raise AssertionError(f"{error}: {left}\n{self.output.text()}") from None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM; assert exit status 0 and that no process is left."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running {timeout_s:g} s after SIGTERM:\n{self.output.text()}") from None
        assert status == 0, f"exit status {status}:\n{self.output.text()}"
        self.wait_gone(WAIT_S)

    def discard(self) -> None:
        """End whatever is left of it, however it ended."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(WAIT_S)
        self.output.close()


def launch(
    *args: str,
    runtime_dir: str,
    env: dict[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    command: str = "serve",
    is_fresh: bool = False,
) -> Server:
    """Start `sie serve`, or another command, with these flags; port 0, JSON logs and one worker unless they say otherwise.

    prefix is a command that becomes the one behind it, such as `prlimit`. is_fresh: as a user starts it, never as a fork
    of a process that has imported everything (`tests.process.warm_start`).
    """
    mark = uuid.uuid4().hex
    base = {
        "--port": "0",
        "--log-format": "json",
        "--devices": devices(1),
        "--runtime-dir": runtime_dir,
        "--state-dir": f"{runtime_dir}/state",
        "--weights-dir": _WEIGHTS,  # the servers of all runs share it, so most loads take milliseconds
        "--memory-pressure-pct": "98",  # what other programs hold of this machine is no reason to refuse a model here
    }
    if command == "serve" and not _is_timed:
        base["--tick-timeout-s"] = "60"  # a frontend that gets no core, as all are wanted by others, is not dead
    if command in ("serve", "gateway") and not _is_timed:
        base["--request-timeout-s"] = "100"  # nor is a request late, or a worker whose successor must be started first
    defaults = [word for flag, value in base.items() if flag not in args for word in (flag, value)]
    words = [*prefix, sys.executable, "-m", "sie", command, *defaults, *args]
    forked = None if is_fresh or prefix or DEVICE != "cpu" else start_warm(words, {**(env or {}), _MARK: mark})
    if forked is not None:
        return Server(forked, mark)
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(env or {}), _MARK: mark},
        process_group=0,
    )
    return Server(process, mark)


@contextlib.contextmanager
def start_server(
    *args: str,
    env: dict[str, str] | None = None,
    is_stopped: bool = False,
    is_busy: bool = False,
    prefix: tuple[str, ...] = (),
    command: str = "serve",
    is_fresh: bool = False,
) -> Iterator[Server]:
    """Yield a ready server; at the end stop it, unless the test has (is_stopped), and assert that nothing is left.

    No extent may stay in use, no process, and no file; is_busy says that the test leaves work which is still running.
    When the test fails, the server's log is shown.
    """
    with tempfile.TemporaryDirectory(prefix="sie-test-") as runtime_dir:
        server = launch(*args, runtime_dir=runtime_dir, env=env, prefix=prefix, command=command, is_fresh=is_fresh)
        try:
            server.wait_ready()
            yield server
            if not is_stopped:
                if not is_busy:
                    eventually(lambda: not extents_in_use(server.port), "no extent in use after the test")
                server.stop()
                left = [path.name for path in Path(runtime_dir).iterdir() if path.name != "state"]
                assert not left, f"left in the runtime directory: {left}"
        except BaseException:
            print(f"--- log of the server ---\n{server.output.text()}")
            raise
        finally:
            server.discard()


def extents_in_use(port: int) -> int | None:
    """Return how many request and reply extents are under a lease; None where that cannot be read: with keys, with TLS.

    Read by hand: tests ask this in the middle of a request of a second, and parsing the whole page may take as long.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SCRAPE_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        page = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return sum(int(float(value)) for value in _EXTENTS.findall(page)) if response.status == 200 else None


def free_port() -> int:
    """Return a port that nobody listens on, for a server that cannot take port 0.

    It lies below those that the kernel gives to clients, so none takes it before the server does.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(max(1024, first - 16384), first) if first > 2048 else 0
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]


def run_to_end(
    *args: str, env: dict[str, str] | None = None, timeout_s: float = WAIT_S, prefix: tuple[str, ...] = (),
    command: str = "serve",
) -> tuple[int, str]:  # fmt: skip
    """Run `sie serve`, or another command, that is expected to refuse to start; return its exit status and what it wrote to stderr."""
    with tempfile.TemporaryDirectory(prefix="sie-test-") as runtime_dir:
        server = launch(*args, runtime_dir=runtime_dir, env=env, prefix=prefix, command=command)
        try:
            status = server.process.wait(timeout_s)
        finally:
            server.discard()
        assert not list(Path(runtime_dir).glob("run-*")), "its directory is left"
        return status, server.output.text()
