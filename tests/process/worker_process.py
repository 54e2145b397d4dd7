"""One worker process as the supervisor starts it, and a frontend at the end of its ring: what a stream is made of, without HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from sie.catalog.spec import parse_model_spec
from sie.catalog.stub import stub_card
from sie.config.settings import Settings
from sie.ipc.channel import Channel
from sie.ipc.messages import Attach, Configure, Hello, Launch, Load, ModelReport, Ready
from sie.shm.attach import PendingAttachment
from sie.shm.core_board import CoreBoard
from sie.shm.inflight import InflightPage
from sie.shm.large import LargeBudget
from sie.shm.pages import CounterPage
from sie.shm.space import OutboundSpace
from tests.process.harness import WAIT_S
from tests.unit.workers.generation_rig import RingFrontend

MIB = 1 << 20
TIMEOUT_S = WAIT_S
ValueT = TypeVar("ValueT")


class WorkerProcess:
    """A worker and its frontend."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel, settings: Settings) -> None:
        self.process = process
        self.channel = channel
        self.counters = CounterPage.create(1 << 18)
        self.page = InflightPage.create(2 * settings.scheduler.max_step_items)
        self.board = CoreBoard.create(1, 0)
        self._space = OutboundSpace.create("request", 8 * MIB, LargeBudget(0), large_extent_bytes=8 * MIB)
        self._settings = settings
        self.frontend: RingFrontend

    def start(self, *models: str) -> None:
        """Configure it, load models (specs of stubs) and attach the frontend."""
        self.channel.send(Configure(self._settings), [self.counters.fd, self.page.fd, self.board.fd])
        self.hear(lambda message: isinstance(message, Ready))
        for spec in models:
            card = stub_card(parse_model_spec(spec))
            self.channel.send(Load(card))
            self.hear(lambda message: isinstance(message, ModelReport) and message.state == "loaded")
        capacity = self._settings.memory.ring_capacity
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pending = PendingAttachment(ends[0], os.pidfd_open(self.process.pid), 1, self._space, capacity)
        pidfd = os.pidfd_open(os.getpid())
        self.channel.send(Attach(0, 1), [ends[1].fileno(), pidfd])
        ends[1].close()
        os.close(pidfd)
        attachment = self.wait(pending.try_finish, "the worker's offer")
        self.frontend = RingFrontend(attachment, self._space)

    def hear(self, is_wanted: Callable[[object], bool]) -> None:
        """Wait for a message of the worker."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_wanted(self.channel.receive(deadline_s - time.monotonic())[0]):
            pass

    def wait(self, condition: Callable[[], ValueT | None], what: str) -> ValueT:
        """Return the first true value of a condition, reading what the worker sends meanwhile."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            assert time.monotonic() < deadline_s, f"not in time: {what}"
            assert self.process.poll() is None, f"the worker died before: {what}"
            if hasattr(self, "frontend"):
                self.frontend.drain()
            time.sleep(0.001)
        return value

    def value(self, name: str) -> float:
        """Return the sum of one family of the worker's metrics."""
        return sum(record.value for record in self.counters.records() if record.name == name)

    def num_tokens(self, request_id: int) -> int:
        """Return how many tokens a request's first choice has by now."""
        return len(self.frontend.answers[request_id].tokens[0])

    def close(self) -> None:
        """End it, as the end of the supervisor would."""
        self.channel.close()
        self.process.terminate()
        self.process.wait(TIMEOUT_S)
        self.frontend.attachment.close()
        self._space.close()
        self.page.close()
        self.board.close()
        self.counters.close()


@contextlib.contextmanager
def start_worker(*models: str, settings: Settings | None = None) -> Iterator[WorkerProcess]:
    """Yield a worker process that has loaded these stubs."""
    with (
        tempfile.TemporaryDirectory(prefix="sie-worker-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        path = Path(folder, "control")
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(TIMEOUT_S)
        launch = Launch(
            control_path=str(path), supervisor_pid=os.getpid(), role="worker", slot=0, incarnation=0,
            started_s=time.time(),
        )  # fmt: skip
        argument = msgspec.json.encode(launch).decode()
        process = subprocess.Popen([sys.executable, "-m", "sie.workers.main", argument])
        try:
            channel = Channel(listener.accept()[0])
            message, _ = channel.receive(TIMEOUT_S)
            assert isinstance(message, Hello)
            worker = WorkerProcess(process, channel, settings or Settings())
            worker.start(*models)
            yield worker
            worker.close()
        finally:
            process.kill()
            process.wait()
