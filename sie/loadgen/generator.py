"""Makes the load with one thread, non-blocking sockets and epoll, because it may share cores with the server.

Closed loop: each connection sends its next request after its answer, so the rate follows the server. Open loop:
requests have a fixed time plan, independent of answers. Latency counts from the planned time, also for a request that
waited for a free connection. So a stall of the server shows in every request that it delayed.
"""

from __future__ import annotations

import collections.abc
import ctypes
import gc
import select
import socket
import ssl
import time
from array import array
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from sie.loadgen.arrivals import plan_arrivals
from sie.loadgen.channels import ChannelFactory, MalformedError, Response
from sie.loadgen.dialects import Dialect
from sie.loadgen.runs import Run, Sample
from sie.loadgen.sample_texts import Mix, make_texts
from sie.loadgen.target import Target, reason_of

_RECEIVE_BYTES: Final = 1 << 16
"""Under 128 KiB, because the allocator maps and unmaps each larger buffer, which triples the time of an answer."""
_DRAIN_S: Final = 30.0
"""Longest wait for answers after the last request was due; then they count as errors."""
_FIRST_SAMPLES: Final = 16
_SAMPLE_EVERY: Final = 97
_MAX_SAMPLES: Final = 1024
_MAX_ERROR_CHARS: Final = 300
_PR_SET_TIMERSLACK: Final = 29
_CLOSED, _MALFORMED, _UNANSWERED = "connection closed", "malformed answer", "no answer"
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Call(NamedTuple):
    """One prepared request: the bytes to send and the texts in them."""

    data: bytes
    texts: tuple[str, ...]


class RefusedError(Exception):
    """The server does not serve the load's requests; the text is its answer."""


def make_calls(
    dialect: Dialect, target: Target, mix: Mix, *, num_texts: int, num_calls: int, seed: int = 1
) -> list[Call]:
    """Return num_calls different requests of num_texts texts each."""
    texts = make_texts(mix, num_calls * num_texts, seed)
    own = (tuple(texts[start : start + num_texts]) for start in range(0, len(texts), num_texts))
    return [Call(dialect.request(target, part), part) for part in own]


class _Connection:
    __slots__ = ("call", "channel", "due_ns", "fd", "sock", "unsent")

    def __init__(self) -> None:
        self.call = -1
        self.due_ns = 0

    def open(self, target: Target, new_channel: ChannelFactory) -> None:
        self.sock: socket.socket = target.connect()
        self.fd = self.sock.fileno()
        self.channel = new_channel()
        self.unsent = b""


class Generator:
    """Connections to one server, used for successive runs."""

    def __init__(self, target: Target, new_channel: ChannelFactory, calls: Sequence[Call]) -> None:
        """Prepare to send calls in turn, keeping some answers for the judge."""
        self._target = target
        self._new_channel = new_channel
        self._data = [call.data for call in calls]
        self._epoll = select.epoll()
        self._by_fd: dict[int, _Connection] = {}
        self._next_call = 0
        # Otherwise the kernel may add 50 us to each wait of an open loop.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def ask_each(self) -> list[Response]:
        """Return the answer to each call, sent one at a time.

        Raises RefusedError for the first bad answer, TargetError when there is no connection.
        """
        responses: list[Response] = []
        connections = self._connect(1)
        for call in range(len(self._data)):
            run, self._next_call = Run(""), call
            self._keep_busy(connections, run, 0)
            if not run.samples:
                raise RefusedError(run.first_error or f"{run.errors_text()}{self._target.hint_of_tls}")
            responses.append(run.samples[0].response)
        self._next_call = 0
        return responses

    def run_closed(self, num_connections: int, duration_s: float) -> Run:
        """Keep num_connections busy for duration_s, then wait for running requests. Raises TargetError."""
        run = Run(f"{num_connections} connection{'s' if num_connections > 1 else ''}")
        connections = self._connect(num_connections)
        with _timed(run):
            self._keep_busy(connections, run, int(duration_s * 1e9))
        return run

    def _keep_busy(self, connections: list[_Connection], run: Run, duration_ns: int) -> None:
        """Send on each connection at least once and until the time is over, and wait for the answers."""
        clock, poll, by_fd = time.monotonic_ns, self._epoll.poll, self._by_fd
        end_ns = clock() + duration_ns
        for connection in connections:
            self._start(connection, clock())
        busy = len(connections)
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
                run.errors[_UNANSWERED] += busy
                break

    def run_open(self, num_connections: int, rate: float, duration_s: float, *, poisson: bool = True) -> Run:
        """Send rate requests a second for duration_s, evenly or with Poisson gaps. Raises TargetError."""
        run = Run(f"{rate:,.0f}/s")
        idle = self._connect(num_connections)
        plan_ns = plan_arrivals(rate, duration_s, poisson=poisson)
        with _timed(run):
            due = array("q", (plan_ns + time.monotonic_ns()).tobytes())  # 8 bytes each; a list takes 40
            give_up_ns, at, end = due[-1] + int(_DRAIN_S * 1e9), 0, len(due)
            clock, poll, by_fd, epoll_fd = time.monotonic_ns, self._epoll.poll, self._by_fd, self._epoll.fileno()
            free_since_ns = clock()
            while at < end or len(idle) < num_connections:
                now_ns = clock()
                while at < end and idle and due[at] <= now_ns:
                    run.lateness.record(now_ns - max(due[at], free_since_ns))
                    self._start(idle.pop(), due[at])
                    at += 1
                if now_ns > give_up_ns:
                    run.errors[_UNANSWERED] += end - at + num_connections - len(idle)
                    break
                # epoll waits in whole milliseconds; select on its fd waits in microseconds.
                wait_s = max(0.0, (due[at] - clock()) / 1e9) if at < end and idle else 0.5
                if wait_s:
                    select.select((epoll_fd,), (), (), wait_s)
                for fd, event in poll(0):
                    connection = by_fd[fd]
                    if self._on_event(connection, event, run):
                        if not idle:
                            free_since_ns = clock()
                        idle.append(connection)
        return run

    def close(self) -> None:
        """Close all connections."""
        self._close_all()
        self._epoll.close()

    def _connect(self, count: int) -> list[_Connection]:
        """Close all connections and open count new ones, so that a run never gets an answer of the previous run."""
        self._close_all()
        return [self._open(_Connection()) for _ in range(count)]

    def _close_all(self) -> None:
        for connection in self._by_fd.values():
            connection.sock.close()
        self._by_fd.clear()

    def _open(self, connection: _Connection) -> _Connection:
        connection.open(self._target, self._new_channel)
        self._by_fd[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)
        if opening := connection.channel.opening():
            self._send(connection, opening)
        return connection

    def _start(self, connection: _Connection, due_ns: int) -> None:
        call = self._next_call
        self._next_call = (call + 1) % len(self._data)
        connection.call, connection.due_ns = call, due_ns
        self._send(connection, connection.channel.frame(self._data[call]))

    def _send(self, connection: _Connection, data: bytes) -> None:
        if connection.unsent:
            connection.unsent += data
            return
        try:
            sent = connection.sock.send(data)
        except _NOT_NOW:
            sent = 0
        except OSError:
            return  # the kernel reports the end of the connection as an event, which counts the error
        if sent < len(data):
            connection.unsent = data[sent:]
            self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _send_rest(self, connection: _Connection) -> None:
        rest, connection.unsent = connection.unsent, b""
        self._send(connection, rest)
        if not connection.unsent:
            self._epoll.modify(connection.fd, select.EPOLLIN)

    def _on_event(self, connection: _Connection, event: int, run: Run) -> bool:
        """Read or write as much as possible; return whether the connection's request has ended, well or not."""
        if connection.unsent and event & select.EPOLLOUT:
            self._send_rest(connection)
        if not event & ~select.EPOLLOUT:
            return False
        try:
            data = connection.sock.recv(_RECEIVE_BYTES)
        except _NOT_NOW:
            return False
        except OSError as error:
            run.first_error = run.first_error or (reason_of(error) if isinstance(error, ssl.SSLError) else "")
            data = b""
        if not data:
            return self._reopen(connection, run, _CLOSED)
        try:
            response = connection.channel.feed(data)
        except MalformedError as error:
            run.first_error = run.first_error or str(error)
            return self._reopen(connection, run, _MALFORMED)
        if replies := connection.channel.replies():
            self._send(connection, replies)
        if response is None:
            return False
        self._record(connection, response, run)
        return True

    def _record(self, connection: _Connection, response: Response, run: Run) -> None:
        if response.error:
            run.errors[response.error] += 1
            if not run.first_error:
                run.first_error = _error_text(response)
            return
        latency_ns = time.monotonic_ns() - connection.due_ns
        run.call_counts[connection.call] += 1
        run.latencies.record(latency_ns)
        run.num_good += 1
        if (run.num_good <= _FIRST_SAMPLES or not run.num_good % _SAMPLE_EVERY) and len(run.samples) < _MAX_SAMPLES:
            run.samples.append(Sample(connection.call, latency_ns, response))

    def _reopen(self, connection: _Connection, run: Run, reason: str) -> bool:
        """Count a request whose connection broke, and connect again; always True.

        Raises TargetError when the server is gone.
        """
        run.errors[reason] += 1
        del self._by_fd[connection.fd]
        connection.sock.close()
        self._open(connection)
        return True


@contextmanager
def _timed(run: Run) -> collections.abc.Generator[None]:
    """Time a run, with garbage collection turned off, because it would pause the load."""
    gc.collect()
    gc.disable()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        run.elapsed_s, run.cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        gc.enable()


def _error_text(response: Response) -> str:
    told = response.body.decode(errors="replace").strip()[:_MAX_ERROR_CHARS] or _status_text(response)
    return f"{response.error}: {told}" if told else response.error


def _status_text(response: Response) -> str:
    """Return the error text in the headers of an answer without a body."""
    lines = response.head.decode("latin-1").split("\r\n")
    told = [line for line in lines if line.lower().startswith("nv-status")]
    return (told or lines)[0][:_MAX_ERROR_CHARS]
