"""Pairs the memory of frontends and workers, and keeps the pages that outlive a worker.

For an attachment each side gets one end of a socketpair; the two then exchange their memory without the supervisor.
"""

from __future__ import annotations

import socket
from typing import Protocol

from sie.ipc import messages
from sie.ipc.messages import Message
from sie.runtime.logs import get_logger
from sie.shm.core_board import CoreBoard
from sie.shm.inflight import InflightPage, InflightStatus
from sie.supervisor.child import Child

_log = get_logger(__name__)


class Send(Protocol):
    """Sends a message, with descriptors, to a connected child."""

    def __call__(self, child: Child, message: Message, fds: list[int] | None = None) -> None: ...


class Attachments:
    """The attachments of every frontend to every worker, each with the generation of its latest pairing."""

    def __init__(self, send: Send, frontends: list[Child], workers: list[Child], max_step_items: int) -> None:
        self._send = send
        self._frontends = frontends
        self._workers = workers
        self._inflight = [InflightPage.create(2 * max_step_items) for _ in workers]
        self._board = CoreBoard.create(len(workers), sum(len(worker.place.cores) for worker in workers))
        self._generations: dict[tuple[int, int], int] = {}
        """By frontend and worker slot."""
        self._num_generations = 0

    def worker_fds(self, worker: Child) -> list[int]:
        """Return the descriptors of a worker's in-flight page and of the core board."""
        return [self._inflight[worker.slot].fd, self._board.fd]

    def read_only_board_fd(self) -> int:
        """Return a new descriptor through which the core board can only be read. The caller closes it."""
        return self._board.read_only_fd()

    def running(self, worker: Child) -> InflightStatus:
        """Return the in-flight status that a worker publishes."""
        return self._inflight[worker.slot].read()

    def pair(self, child: Child) -> None:
        """Attach a child that has just connected to every connected peer."""
        for worker in [child] if child.role == "worker" else self._workers:
            for frontend in [child] if child.role == "frontend" else self._frontends:
                if worker.channel is not None and frontend.channel is not None:
                    self._attach(frontend, worker)

    def repair(self, frontend: Child, slot: int, generation: int) -> None:
        """Attach a frontend to a worker again whose end of this attachment is closed, if both still live."""
        worker = self._workers[slot]
        is_latest = self._generations.get((frontend.slot, slot)) == generation
        if is_latest and frontend.channel is not None and worker.channel is not None:
            _log.warning("%s is attached to %s again", frontend.name, worker.name)
            self._send(frontend, messages.WorkerDown(slot, generation, ()))
            self._attach(frontend, worker)

    def end(self, worker: Child, suspects: tuple[tuple[int, int], ...]) -> None:
        """Tell the frontends to drain a dead worker's rings one last time, and which of their requests are suspects.

        suspects: pairs of frontend slot and request id.
        """
        self._inflight[worker.slot].reset()
        self._board.forget(worker.slot)
        for frontend in self._frontends:
            generation = self._generations.pop((frontend.slot, worker.slot), None)
            if generation is not None:
                ids = tuple(request_id for slot, request_id in suspects if slot == frontend.slot)
                self._send(frontend, messages.WorkerDown(worker.slot, generation, ids))

    def set_late(self, worker: Child, *, is_late: bool) -> None:
        """Tell each frontend whether a worker is late, and which of its own requests are in the late step."""
        if worker.is_late == is_late:
            return
        worker.is_late = is_late
        entries = self.running(worker).entries if is_late else []
        for frontend in self._frontends:
            generation = self._generations.get((frontend.slot, worker.slot))
            if generation is not None:
                ids = tuple(entry.request_id for entry in entries if entry.frontend == frontend.slot)
                self._send(frontend, messages.WorkerLate(worker.slot, generation, is_late, ids))

    def _attach(self, frontend: Child, worker: Child) -> None:
        self._num_generations += 1
        generation = self._generations[frontend.slot, worker.slot] = self._num_generations
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._send(frontend, messages.Attach(worker.slot, generation), [ours.fileno(), worker.peer_pidfd])
            self._send(worker, messages.Attach(frontend.slot, generation), [theirs.fileno(), frontend.peer_pidfd])
