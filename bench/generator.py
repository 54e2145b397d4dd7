"""Owns the load: one thread, raw non-blocking sockets and epoll, because it shares its cores with the server.

Closed loop: each connection sends its next request when it has its answer, so the rate follows the server. Open loop:
requests have a time plan that no answer changes, and latency counts from the planned time, also of a request that had
to wait for a free connection: a stall of the server shows in every request that it delayed.
"""

from __future__ import annotations

import ctypes
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from wire import Call, WrongAnswerError, response_bytes, status_of

_RECEIVE_BYTES = 1 << 16
"""Under 128 KiB: the allocator would map and unmap each larger buffer, which triples the time of an answer."""
_OK = b"HTTP/1.1 200"
_DRAIN_S = 5.0
"""How long answers may take after the last request was due; then they count as errors."""
_MAX_SAMPLES = 2048
_PR_SET_TIMERSLACK = 29

CLOSED, MALFORMED, UNANSWERED = "connection closed", "malformed response", "no answer"


class Sample(NamedTuple):
    """One answer with status 200."""

    call: int
    """Which of the generator's calls it answers."""
    latency_ns: int
    response: bytes


class Run:
    """What one run brought: latencies of the answers with status 200 in nanoseconds, everything else by its kind."""

    def __init__(self) -> None:
        self.latencies_ns: list[int] = []
        self.errors: Counter[str] = Counter()
        self.samples: list[Sample] = []
        """Some of the answers, to be judged afterwards."""
        self.call_counts: Counter[int] = Counter()
        self.elapsed_s = 0.0
        self.cpu_s = 0.0
        """What this process itself used."""
        self.lateness_ns: list[int] = []
        """Open loop: by how much sending was late although a connection was free, the generator's own error."""

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return len(self.latencies_ns) / self.elapsed_s

    @property
    def num_errors(self) -> int:
        """Requests that were not answered with 200."""
        return self.errors.total()

    def latency_ms(self, *percentiles: float) -> list[float]:
        """Return these percentiles of the latency; 100 is the maximum."""
        if not self.latencies_ns:
            return [float("nan")] * len(percentiles)
        return [float(value) / 1e6 for value in np.percentile(self.latencies_ns, percentiles, method="higher")]


class _Connection:
    __slots__ = ("address", "buffer", "call", "due_ns", "fd", "missing", "recv", "send", "sock", "unsent")

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.open()

    def open(self) -> None:
        self.sock = socket.create_connection(self.address, timeout=5)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self.fd = self.sock.fileno()
        self.recv, self.send = self.sock.recv, self.sock.send
        self.buffer = bytearray()
        self.missing = 0
        self.unsent = b""
        self.call = -1
        self.due_ns = 0


class Generator:
    """Connections to one server, used for one run after the other."""

    def __init__(self, host: str, port: int, calls: Sequence[Call], *, sample_every: int = 97) -> None:
        """Prepare to send calls in turn, keeping one of sample_every answers."""
        self._sample_every = sample_every
        self._address = (host, port)
        self._data = [call.data for call in calls]
        self._epoll = select.epoll()
        self._by_fd: dict[int, _Connection] = {}
        self._next_call = 0
        # The kernel may otherwise add 50 us to each wait of an open loop.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def run_closed(self, num_connections: int, duration_s: float) -> Run:
        """Keep num_connections busy for duration_s, then wait for what is on its way."""
        run = Run()
        connections = self._connect(num_connections)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        end_ns = time.monotonic_ns() + int(duration_s * 1e9)
        for connection in connections:
            self._start(connection, time.monotonic_ns())
        clock, poll, by_fd = time.monotonic_ns, self._epoll.poll, self._by_fd
        busy = num_connections
        while busy:
            events = poll(0.5)
            now_ns = clock()
            for fd, event in events:
                connection = by_fd[fd]
                if self._on_event(connection, event, run):
                    if now_ns < end_ns:
                        self._start(connection, clock())
                    else:
                        busy -= 1
            if now_ns > end_ns + _DRAIN_S * 1e9:
                run.errors[UNANSWERED] += busy
                break
        self._finish(run, began_s, began_cpu_s)
        return run

    def run_open(self, num_connections: int, rate: float, duration_s: float, *, poisson: bool = True) -> Run:
        """Send rate requests a second for duration_s, evenly or with a Poisson process's gaps (seeded)."""
        run = Run()
        idle = self._connect(num_connections)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        plan = _plan_arrivals(rate, duration_s, poisson=poisson) + time.monotonic_ns()
        due = deque(plan.tolist())
        give_up_ns = due[-1] + int(_DRAIN_S * 1e9)
        clock, poll, by_fd, epoll_fd = time.monotonic_ns, self._epoll.poll, self._by_fd, self._epoll.fileno()
        free_since_ns = clock()
        while due or len(idle) < num_connections:
            now_ns = clock()
            while due and idle and due[0] <= now_ns:
                due_ns = due.popleft()
                run.lateness_ns.append(now_ns - max(due_ns, free_since_ns))
                self._start(idle.pop(), due_ns)
            if now_ns > give_up_ns:
                run.errors[UNANSWERED] += len(due) + num_connections - len(idle)
                break
            # epoll alone waits in whole milliseconds; select on its fd waits in microseconds.
            wait_s = max(0.0, (due[0] - clock()) / 1e9) if due and idle else 0.5
            if wait_s:
                select.select((epoll_fd,), (), (), wait_s)
            for fd, event in poll(0):
                connection = by_fd[fd]
                if self._on_event(connection, event, run):
                    if not idle:
                        free_since_ns = clock()
                    idle.append(connection)
        self._finish(run, began_s, began_cpu_s)
        return run

    def close(self) -> None:
        """Close all connections."""
        for connection in self._by_fd.values():
            connection.sock.close()
        self._by_fd.clear()
        self._epoll.close()

    def _connect(self, count: int) -> list[_Connection]:
        """Close all connections and open count new ones: a run never sees an answer of the one before."""
        for connection in self._by_fd.values():
            connection.sock.close()
        self._by_fd.clear()
        for _ in range(count):
            self._register(_Connection(self._address))
        return list(self._by_fd.values())

    def _register(self, connection: _Connection) -> None:
        self._by_fd[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)

    def _start(self, connection: _Connection, due_ns: int) -> None:
        call = self._next_call
        self._next_call = (call + 1) % len(self._data)
        connection.call, connection.due_ns = call, due_ns
        data = self._data[call]
        try:
            sent = connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the kernel reports the end of the connection as an event, and that counts it
        if sent < len(data):
            connection.unsent = data[sent:]
            self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _on_event(self, connection: _Connection, event: int, run: Run) -> bool:
        """Read or write what is possible; return whether the connection's request has ended, one way or another."""
        if connection.unsent and event & select.EPOLLOUT:
            self._send_rest(connection)
        if not event & ~select.EPOLLOUT:
            return False
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            return self._reopen(connection, run, CLOSED)
        if connection.buffer:
            connection.buffer += data
            if len(connection.buffer) < connection.missing:
                return False
            data = bytes(connection.buffer)
        try:
            length = response_bytes(data)
        except WrongAnswerError:
            return self._reopen(connection, run, MALFORMED)
        if not length or len(data) < length:
            connection.missing = length
            if not connection.buffer:
                connection.buffer += data
            return False
        connection.buffer.clear()
        self._record(connection, data, run)
        return True

    def _record(self, connection: _Connection, data: bytes, run: Run) -> None:
        if not data.startswith(_OK):
            run.errors[f"status {status_of(data)}"] += 1
            return
        latencies = run.latencies_ns
        latency_ns = time.monotonic_ns() - connection.due_ns
        run.call_counts[connection.call] += 1
        if not len(latencies) % self._sample_every and len(run.samples) < _MAX_SAMPLES:
            run.samples.append(Sample(connection.call, latency_ns, data))
        latencies.append(latency_ns)

    def _send_rest(self, connection: _Connection) -> None:
        try:
            sent = connection.send(connection.unsent)
        except OSError:
            return
        connection.unsent = connection.unsent[sent:]
        if not connection.unsent:
            self._epoll.modify(connection.fd, select.EPOLLIN)

    def _reopen(self, connection: _Connection, run: Run, reason: str) -> bool:
        """Count a request that its connection did not survive, and connect again; always True."""
        run.errors[reason] += 1
        del self._by_fd[connection.fd]
        connection.sock.close()
        connection.open()
        self._register(connection)
        return True

    def _finish(self, run: Run, began_s: float, began_cpu_s: float) -> None:
        run.elapsed_s = time.perf_counter() - began_s
        run.cpu_s = time.process_time() - began_cpu_s


def _plan_arrivals(rate: float, duration_s: float, *, poisson: bool) -> NDArray[np.int64]:
    """Return (n,) nanoseconds from the start, ascending: when each request is due."""
    count = max(1, round(rate * duration_s))
    gaps_ns = np.full(count, 1e9 / rate)
    if poisson:
        gaps_ns *= np.random.default_rng(count).exponential(size=count)
    return gaps_ns.cumsum().astype(np.int64)
