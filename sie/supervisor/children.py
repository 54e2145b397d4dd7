"""Manages the child processes: starts and restarts them, and accepts their control connections.

It does not decide what a message or a death means for models and clients; it passes both to `ChildEvents`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from sie.config.settings import Settings
from sie.ipc import channel as control
from sie.ipc import messages
from sie.ipc.channel import Channel, ChannelClosedError
from sie.ipc.exit_statuses import DEVICE_LOST_STATUS, WORN_STATUS
from sie.ipc.messages import Message
from sie.metrics import definitions
from sie.runtime.logs import get_logger
from sie.shm.inflight import InflightStatus
from sie.shm.pages import CounterPage
from sie.supervisor.attachments import Attachments
from sie.supervisor.certificates import CertificateFiles
from sie.supervisor.child import Child, child_environment
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.launch_records import LaunchRecords
from sie.supervisor.losses import FORGET_KILL_S, plan_after_loss, tokens_after_kill
from sie.supervisor.oom_kills import OomKills
from sie.supervisor.restart import RestartPolicy, plan_restart
from sie.supervisor.server_page import ServerPage
from sie.supervisor.worker_forks import WorkerForks

_log = get_logger(__name__)
_HELLO_TIMEOUT_S = 1.0


class ChildEvents(Protocol):
    """The callbacks through which `Children` reports events."""

    def on_joined(self, child: Child) -> None:
        """A child is connected and configured."""
        ...

    def on_message(self, child: Child, message: Message) -> None:
        """A child sent a message."""
        ...

    def on_worker_death(
        self, worker: Child, status: int, running: InflightStatus, *, was_oom_killed: bool
    ) -> tuple[tuple[int, int], ...]:
        """Classify a worker's death by its exit status. Return the (frontend, request id) pairs that are suspects."""
        ...

    def on_changed(self) -> None:
        """A child died or was given up."""
        ...

    def on_given_up(self, role: messages.Role) -> None:
        """No child of this role is left, and none will be started."""
        ...


class Children:
    """All children of one server, and the shared pages that outlive them."""

    def __init__(
        self,
        settings: Settings,
        places: list[WorkerSlot],
        num_frontends: int,
        launch: messages.Launch,
        events: ChildEvents,
        *,
        grpc: tuple[str, int] | None = None,
        is_gateway: bool = False,
        has_template: bool = False,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """`launch` is the launch record that all children share; grpc is the (host, port) of an extra gRPC frontend.

        is_gateway: the frontends have no workers; their operations run on the hosts of a cluster. has_template: workers
        are forked from a process that has imported the libraries.
        """
        self._certificates = certificates
        self._settings = settings
        self._events = events
        self._control_path = launch.control_path
        self.workers = [Child("worker", slot, place) for slot, place in enumerate(places)]
        self._http: messages.Protocol = "gateway" if is_gateway else "http"
        protocols: list[messages.Protocol] = [self._http] * num_frontends
        if grpc is not None:
            protocols.append("grpc")
        if settings.cluster.nats and not is_gateway:
            protocols.append("nats")
        self.frontends = [Child("frontend", slot, WorkerSlot(""), protocol) for slot, protocol in enumerate(protocols)]
        has_agent = settings.agents.is_on and not settings.agents.agent_socket and not is_gateway
        self.agents = [Child("agent", 0, WorkerSlot(""))] if has_agent else []
        """The agent process, if tools may run and no other service runs it."""
        self.stand_in: Child | None = None
        """The last frontend. It runs only while the others are replaced, and exists only with certificates."""
        if certificates is not None:
            self.stand_in = Child("frontend", len(self.frontends), WorkerSlot(""), self._http)
            self.stand_in.state = "gone"
            self.frontends.append(self.stand_in)
        page_bytes = settings.memory.counter_page_bytes
        self.page = ServerPage(page_bytes)
        self._pages = {child.name: CounterPage.create(page_bytes) for child in self.all}
        self.attachments = Attachments(self.send, self.frontends, self.workers, settings.scheduler.max_step_items)
        self._records = LaunchRecords(
            launch, self.workers, len(self.frontends),
            is_lending=settings.devices.max_lent_cores > 0, grpc=grpc, certificates=certificates,
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._has_template = has_template
        self._forks: WorkerForks | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._death = asyncio.Event()
        self.oom_kills = OomKills()
        self._keys: messages.Keys | None = None
        self.is_draining = False
        """Once set, dead frontends are not restarted. Workers are, because accepted requests need them."""
        self.is_stopping = False
        """Once set, no child is restarted."""

    @property
    def all(self) -> list[Child]:
        """Workers, then frontends, then the agent process."""
        return [*self.workers, *self.frontends, *self.agents]

    @property
    def num_http_frontends(self) -> int:
        """The number of HTTP frontends without the stand-in."""
        return sum(child.protocol == self._http and child is not self.stand_in for child in self.frontends)

    @property
    def are_frontends_ready(self) -> bool:
        """Whether every frontend except the stand-in is ready."""
        return all(child.state == "ready" for child in self.frontends if child is not self.stand_in)

    def open(self) -> None:
        """Listen for control connections on a 0600 socket, and start all children."""
        path = Path(self._control_path)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._on_connect)
        if self._has_template:
            self._forks = WorkerForks(
                child_environment(num_threads=1), self._settings.supervisor.start_timeout_s,
                on_settled=self._start_first_workers, is_stopping=lambda: self.is_stopping,
            )  # fmt: skip
        must_wait = self._forks is not None and self._forks.is_starting
        for child in self.all:
            if child is not self.stand_in and not (child.role == "worker" and must_wait):
                self._start(child)

    def close(self) -> None:
        """Stop listening. Call it after every child has ended."""
        if self._forks is not None:
            self._forks.close()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def kill_peer(self, reporter: Child, slot: int) -> None:
        """Kill the child in `slot` on the other side of an attachment because it broke the protocol."""
        peers = self.frontends if reporter.role == "worker" else self.workers
        for peer in peers[slot : slot + 1]:
            _log.error("%s says that %s broke the protocol; killing it", reporter.name, peer.name)
            peer.kill_as_faulty()

    def reconfigure(self, settings: Settings) -> None:
        """Send new settings to every child, also to those that start later."""
        self._settings = settings
        self._records.set_log_level(settings.server.log_level)
        self.send_all(self.all, messages.Configure(settings))

    def set_keys(self, keys: messages.Keys) -> None:
        """Send new API keys to every frontend, also to those that start later."""
        self._keys = keys
        self.page.show_keys(keys)
        self.send_all(self.frontends, keys)

    def restart(self, frontend: Child) -> None:
        """Start a frontend whose process has ended on request."""
        frontend.state = "waiting"
        self._start(frontend)

    async def until_gone(self, children: list[Child], timeout_s: float) -> None:
        """Wait until none of these children has a process, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(child.process is not None for child in children):
                    self._death.clear()
                    await self._death.wait()

    def send(self, child: Child, message: Message, fds: list[int] | None = None) -> None:
        """Send to a connected child. A child that does not read its channel is killed and restarted."""
        if child.channel is None:
            return
        try:
            child.channel.send(message, fds)
        except ChannelClosedError as error:
            has_left = self._is_leaving(child) and isinstance(error.__cause__, ConnectionError)
            if not has_left:
                _log.warning("%s does not read its control channel: %s", child.name, error)
            child.kill()

    def send_all(self, children: Iterable[Child], message: Message) -> None:
        """Send to each of these children."""
        for child in children:
            self.send(child, message)

    def set_ready(self, child: Child) -> None:
        """Mark a child as ready."""
        child.state = "ready"
        child.pong_s = time.monotonic()
        if child.role == "worker":
            self.page.show_worker(child)

    @property
    def pages(self) -> list[CounterPage]:
        """The counter pages of all processes, our own first."""
        return [self.page.page, *self._pages.values()]

    # --- start ----------------------------------------------------------------------------------------------------

    def _start_first_workers(self) -> None:
        for worker in self.workers:
            if worker.state == "waiting" and not worker.incarnation:
                self._start(worker)

    def _start(self, child: Child) -> None:
        if self.is_stopping or (self.is_draining and child.role == "frontend"):
            child.state = "gone"
            return
        if child.role == "worker":
            self.page.create_restarts(child)
            self.page.show_worker(child)
        tls_fds = self._certificates.fds if self._certificates is not None else ()
        launch, num_threads = self._records.next_of(child), self._num_threads(child)
        try:
            child.start(launch, num_threads, time.monotonic(), tls_fds, self._forks if child.role == "worker" else None)
        except OSError as error:  # for example a process limit
            _log.error("%s cannot be started: %s", child.name, error)
            self._plan_restart(child, was_ready=False, was_killed=False)
            return
        self._loop.add_reader(child.pidfd, self._on_death, child)

    def _num_threads(self, child: Child) -> int:
        if child.role != "worker":
            return 1
        return self._settings.devices.threads_per_worker or max(1, len(child.place.cores))

    def _on_connect(self) -> None:
        sock, _ = self._listener.accept()
        pid, uid = control.peer_credentials(sock)
        channel = Channel(sock)
        try:
            hello, fds = channel.receive(_HELLO_TIMEOUT_S)
        except (ChannelClosedError, TimeoutError):
            channel.close()
            return
        for fd in fds:
            os.close(fd)
        child = self._child_of(hello) if uid == os.getuid() else None
        if child is None:
            _log.warning("refused a control connection of pid %d, uid %d", pid, uid)
            channel.close()
            return
        child.adopt(channel, pid)
        self._loop.add_reader(channel.fileno(), self._on_readable, child)
        self._configure(child)
        self._events.on_joined(child)

    def _child_of(self, hello: Message) -> Child | None:
        if not isinstance(hello, messages.Hello):
            return None
        slots = {"worker": self.workers, "frontend": self.frontends, "agent": self.agents}[hello.role]
        for child in slots[hello.slot : hello.slot + 1]:
            if child.process is not None and child.channel is None and child.incarnation == hello.incarnation:
                return child
        return None

    def _configure(self, child: Child) -> None:
        own = self._pages[child.name]
        if child.role == "agent":
            self.send(child, messages.Configure(self._settings))
            return
        if child.role == "worker":
            self.send(child, messages.Configure(self._settings), [own.fd, *self.attachments.worker_fds(child)])
        else:
            others = [self.page.page, *(page for page in self._pages.values() if page is not own)]
            read_only = [self.attachments.read_only_board_fd(), *(page.read_only_fd() for page in others)]
            self.send(child, messages.Configure(self._settings), [own.fd, *read_only])
            if self._keys is not None:
                self.send(child, self._keys)
            for fd in read_only:
                os.close(fd)
        self.attachments.pair(child)

    def _on_readable(self, child: Child) -> None:
        channel = child.channel
        try:
            while channel is not None and channel is child.channel and (received := channel.try_receive()) is not None:
                message, fds = received
                for fd in fds:
                    os.close(fd)
                self._events.on_message(child, message)
        except ChannelClosedError:
            if channel is not None and channel is child.channel:
                self._loop.remove_reader(channel.fileno())
                child.kill()

    # --- death ----------------------------------------------------------------------------------------------------

    def _on_death(self, child: Child) -> None:
        self._loop.remove_reader(child.pidfd)
        if child.channel is not None:
            self._loop.remove_reader(child.channel.fileno())
        was_ready = child.state == "ready"
        child.kill()
        status = child.reap()
        is_final = self._is_leaving(child)
        child.state = "gone" if is_final else "waiting"
        was_oom_killed = status == -signal.SIGKILL and self.oom_kills.explain_death()
        if child.role == "worker":
            self._report_worker_death(child, status, was_oom_killed)
        if not is_final:
            _log.warning("%s ended with status %d", child.name, status)
            if status == DEVICE_LOST_STATUS:
                self._plan_after_loss(child)
            elif status == WORN_STATUS:
                child.without_graphs = True
                self._start_after(child, 0.0)
            else:
                was_killed = status == -signal.SIGKILL and not (child.is_faulty or was_oom_killed)
                self._plan_restart(child, was_ready, was_killed)
        if child.role == "worker":
            self.page.show_worker(child)
        self._death.set()
        self._events.on_changed()

    def _is_leaving(self, child: Child) -> bool:
        """Return whether a child is about to end as intended; it closes its control channel just before."""
        return self.is_stopping or child.is_retired or (self.is_draining and child.role == "frontend")

    def _report_worker_death(self, worker: Child, status: int, was_oom_killed: bool) -> None:
        """Report a worker's death, and limit its next process's steps if it was killed for lack of memory."""
        running = self.attachments.running(worker)
        suspects = self._events.on_worker_death(worker, status, running, was_oom_killed=was_oom_killed)
        if time.monotonic() - worker.started_s >= FORGET_KILL_S:
            worker.max_step_tokens = 0
        if was_oom_killed:
            worker.max_step_tokens = tokens_after_kill(worker.max_step_tokens, running.num_tokens)
            _log.warning(
                "%s was killed for lack of memory, in a step of %d tokens; most tokens in a step of its successor: %s",
                worker.name, running.num_tokens, worker.max_step_tokens or "not limited",
            )  # fmt: skip
        self.attachments.end(worker, suspects)

    def _plan_restart(self, child: Child, was_ready: bool, was_killed: bool) -> None:
        s = self._settings.supervisor
        policy = RestartPolicy(budget=s.restart_budget, window_s=s.restart_window_s, backoff_s=s.restart_backoff_s)
        delay_s = plan_restart(policy, child.history, was_ready, time.monotonic(), was_killed=was_killed)
        if delay_s is None:
            child.state = "gone"
            _log.error(
                "%s failed to start %d times in a row; giving up (restart_budget)", child.name, policy.budget + 1
            )
            siblings = [one for one in self.all if (one.role, one.protocol) == (child.role, child.protocol)]
            if all(sibling.state == "gone" for sibling in siblings):
                self._events.on_given_up(child.role)
            return
        self._start_after(child, delay_s)

    def _plan_after_loss(self, worker: Child) -> None:
        """Restart a worker that lost its device, or set it aside for a while."""
        delay_s = plan_after_loss(worker.losses, time.monotonic(), self._settings.supervisor.device_retry_s)
        if delay_s:
            worker.state = "lost"
            _log.error(
                "%s: device %s is lost; it is set aside, and retried in %g s (device_retry_s)",
                worker.name, worker.place.device, delay_s,
            )  # fmt: skip
        self._start_after(worker, delay_s)

    def _start_after(self, child: Child, delay_s: float) -> None:
        child.num_restarts += 1
        if child.role == "worker":
            self.page.count(definitions.WORKER_RESTARTS, str(child.slot))
        if delay_s:
            self._loop.call_later(delay_s, self._start, child)
        else:
            self._start(child)
