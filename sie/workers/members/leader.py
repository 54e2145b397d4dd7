"""Starts the followers of a model, tells them each step, and ends this worker when one of them dies.

The death of a member is the death of the group: the worker ends as the follower did, so that the supervisor judges it
by the same rules, restarts it, and its requests go elsewhere or wait.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie.config.settings import Settings
from sie.ipc.exit_statuses import DEVICE_LOST_STATUS
from sie.ipc.messages import CacheRoom, Launch, Neighbour
from sie.runtime.logs import get_logger
from sie.runtime.own_modules import run_module
from sie.values.card import ModelCard
from sie.values.errors import Internal, SieError, from_wire, not_loaded
from sie.workers.device.device import resolve_device
from sie.workers.device.faults import DeviceLostError
from sie.workers.generation.runner import TextGenerator
from sie.workers.members.messages import Embed, FollowerLaunch, Loaded, Message, Start, Step, encode, receive
from sie.workers.model_api import Slot
from sie.workers.sharded.group import Group

_log = get_logger(__name__)
_GRACE_S: Final = 30.0
"""Time for a load to notice that a follower has died; libraries may wait for it for ever."""
_ERROR_WAIT_S: Final = 1.0
_MODULE: Final = "sie.workers.members.follower"

Load = Callable[[Group], TextGenerator]


def load_divided(card: ModelCard, launch: Launch, settings: Settings, load: Load, *, room: CacheRoom) -> TextGenerator:
    """Return the runner of a model that is divided among the devices of this worker and of its neighbours.

    load gets the group, and loads this worker's part. The keys and values of each member take no more than room. Raises
    the errors of load, or the error of a follower's load.
    """
    members = Members(card, launch, settings, room)
    try:
        device = resolve_device(launch.device)
        group = Group(0, card.tensor_parallel, device, members.store_fd, settings.models.load_timeout_s)
        runner = load(group)
        members.settle(settings.models.load_timeout_s)
    except BaseException as error:
        # A follower's error comes first: the leader's may only say that the follower has gone.
        own = None if isinstance(error, DeviceLostError) else members.load_error()
        members.close()
        if own is not None:
            raise own from error
        raise
    runner.followers = members
    weakref.finalize(runner, members.close)
    return runner


class Members:
    """The followers of one model. A thread starts them, and waits for their ends: they die with it."""

    def __init__(self, card: ModelCard, launch: Launch, settings: Settings, room: CacheRoom) -> None:
        """Start the followers, and send them their load. Raises OSError."""
        self.store_fd = os.memfd_create("group", os.MFD_CLOEXEC)
        self._model = card.id
        self._ends = [socket.socketpair() for _ in range(card.tensor_parallel - 1)]
        self._socks = [own for own, _ in self._ends]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_settled, self._is_closing = threading.Event(), threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        started = threading.Event()
        errors: list[OSError] = []
        self._keeper = threading.Thread(
            target=self._keep, args=(card, launch, started, errors), name=f"followers-{card.id}", daemon=True
        )
        self._keeper.start()
        started.wait()
        if errors:
            self.close()
            raise errors[0]
        models = settings.models
        self._send(
            Start(
                card=card, generation=settings.generation, dtype=models.dtype, timeout_s=models.load_timeout_s,
                room=room, native_kernels=settings.devices.native_kernels,
            )
        )  # fmt: skip

    def step(self, slots: Sequence[Slot], copies: Sequence[tuple[int, int]]) -> None:
        """Tell the followers to run a step. Raises OSError if one has gone."""
        self._send(Step.of(slots, copies))

    def embed(self, texts: Sequence[NDArray[np.int32]]) -> None:
        """Tell the followers to run a step of vectors. Raises OSError if one has gone."""
        self._send(Embed.of(texts))

    def settle(self, timeout_s: float) -> None:
        """Wait until all followers have loaded; from then on the end of one ends this process. Raises SieError."""
        for sock in self._socks:
            sock.settimeout(timeout_s)
            try:
                message = receive(sock)
            except OSError as error:
                raise Internal(not_loaded(self._model, f"a follower does not answer: {error}")) from error
            sock.settimeout(None)
            if not isinstance(message, Loaded) or message.error is not None:
                raise _to_error(self._model, message)
        self._is_settled.set()

    def load_error(self) -> SieError | None:
        """Return the error of a follower's load, if one has sent its own soon after the leader's load has failed."""
        socks = {sock.fileno(): sock for sock in self._socks}
        for sock in [socks[fd] for fd in _wait_for(list(socks), _ERROR_WAIT_S)]:
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                message = receive(sock)
                if isinstance(message, Loaded) and message.error is not None:
                    return _to_error(self._model, message)
        return None

    def close(self) -> None:
        """End the followers; return once they have ended. It may be called again."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        os.eventfd_write(self._wake, 1)
        self._keeper.join()
        for sock in self._socks:
            sock.close()
        os.close(self.store_fd)
        os.close(self._wake)

    def _send(self, message: Message) -> None:
        data = encode(message)
        for sock in self._socks:
            sock.sendall(data)

    # --- the keeper's thread --------------------------------------------------------------------------------------

    def _keep(self, card: ModelCard, launch: Launch, started: threading.Event, errors: list[OSError]) -> None:
        try:
            for rank, (place, (_, theirs)) in enumerate(zip(launch.neighbours, self._ends, strict=False), 1):
                self._start(card, launch, rank, place, theirs)
        except OSError as error:
            errors.append(error)
        finally:
            for _, theirs in self._ends:
                theirs.close()
            started.set()
        dead = None if errors else self._wait()
        if dead is not None and not self._is_closing.is_set():
            self._end_worker(dead)
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, card: ModelCard, launch: Launch, rank: int, place: Neighbour, theirs: socket.socket) -> None:
        record = FollowerLaunch(
            leader_pid=os.getpid(), socket_fd=theirs.fileno(), store_fd=self.store_fd, rank=rank,
            name=f"worker-{launch.slot}.{rank}", size=card.tensor_parallel, device=place.device, cores=place.cores,
            log_format=launch.log_format, log_level=launch.log_level,
        )  # fmt: skip
        command = [*run_module(_MODULE), msgspec.json.encode(record).decode()]
        self._processes.append(
            subprocess.Popen(  # noqa: S603  # our own interpreter and module
                command, stdin=subprocess.DEVNULL, process_group=0, pass_fds=(theirs.fileno(), self.store_fd)
            )
        )

    def _wait(self) -> int | None:
        """Wait for the first end of a follower, and return its status; None once the group is closed."""
        pidfds = {os.pidfd_open(process.pid): process for process in self._processes}
        try:
            ready = _wait_for([*pidfds, self._wake])
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        dead = [pidfds[fd].wait() for fd in ready if fd in pidfds]
        return dead[0] if dead and self._wake not in ready else None

    def _end_worker(self, status: int) -> None:
        """End this process as a follower has ended, unless the load that it belongs to fails and closes the group."""
        if not self._is_settled.is_set() and self._is_closing.wait(_GRACE_S):
            return
        _log.critical("%s: a follower has ended with status %d, and the group with it", self._model, status)
        if status == -signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(DEVICE_LOST_STATUS if status == DEVICE_LOST_STATUS else 1)


def _to_error(model: str, message: Message | None) -> SieError:
    """Return the error in a follower's message, or one for a follower that has gone."""
    if isinstance(message, Loaded) and message.error is not None:
        return from_wire(message.error)
    return Internal(not_loaded(model, "a follower ended while it loaded; the server's log has the details"))


def _wait_for(fds: Sequence[int], timeout_s: float | None = None) -> list[int]:
    """Return those that are readable, or whose process has ended; none after timeout_s."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
