"""Attaches a frontend to a worker that the supervisor has introduced, so that they share memory."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

from sie.ipc.messages import Detached
from sie.runtime.logs import get_logger
from sie.shm.attach import Attachment, PendingAttachment
from sie.shm.layout import ProtocolError
from sie.shm.segment import ReservationError
from sie.shm.space import OutboundSpace

_log = get_logger(__name__)
_RETRY_S: Final = 1.0


class Attaching:
    """The workers that were offered this frontend's memory and have not answered. Calls on_attached for each answer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        space: OutboundSpace,
        ring_capacity: int,
        on_attached: Callable[[int, Attachment], None],
        send: Callable[[Detached], None],
    ) -> None:
        """Send tells the supervisor of a worker that could not be attached."""
        self._loop = loop
        self._space = space
        self._ring_capacity = ring_capacity
        self._on_attached = on_attached
        self._send = send
        self._pending: dict[int, tuple[int, PendingAttachment]] = {}
        self._waiting: dict[int, tuple[socket.socket, int, asyncio.TimerHandle]] = {}
        """Workers to which no offer could be made, because memory is short: by generation, the socket, the pidfd and the timer of
        the next try."""

    def begin(self, slot: int, generation: int, fds: list[int]) -> None:
        """Send our offer without waiting; the worker answers after its step. fds: the socket to it, and its pidfd."""
        try:
            sock = socket.socket(fileno=fds[0])
        except OSError as error:
            _log.warning("worker-%d cannot be attached: %s", slot, error)
            for fd in fds:
                os.close(fd)
            self._send(Detached(slot, generation))
            return
        self._offer(slot, generation, sock, fds[1])

    def end(self, generation: int) -> None:
        """Forget the pending attachment of a worker that died."""
        found = self._pending.pop(generation, None)
        if found is not None:
            self._loop.remove_reader(found[1].sock_fd)
            found[1].close()
        waiting = self._waiting.pop(generation, None)
        if waiting is not None:
            sock, pidfd, timer = waiting
            timer.cancel()
            sock.close()
            os.close(pidfd)

    def _offer(self, slot: int, generation: int, sock: socket.socket, pidfd: int) -> None:
        did_wait = self._waiting.pop(generation, None) is not None
        try:
            pending = PendingAttachment(sock, pidfd, generation, self._space, self._ring_capacity)
        except ReservationError as error:
            if not did_wait:
                _log.error("worker-%d has to wait for this frontend: %s", slot, error)
            timer = self._loop.call_later(_RETRY_S, self._offer, slot, generation, sock, pidfd)
            self._waiting[generation] = (sock, pidfd, timer)
            return
        except OSError as error:
            _log.warning("worker-%d cannot be attached: %s", slot, error)
            sock.close()
            os.close(pidfd)
            self._send(Detached(slot, generation))
            return
        self._pending[generation] = (slot, pending)
        self._loop.add_reader(pending.sock_fd, self._finish, generation)

    def _finish(self, generation: int) -> None:
        slot, pending = self._pending[generation]
        try:
            attachment: Attachment | None = pending.try_finish()
        except (OSError, ProtocolError) as error:
            _log.warning("worker-%d did not attach: %s", slot, error)
            self._loop.remove_reader(pending.sock_fd)
            pending.close()
            del self._pending[generation]
            self._send(Detached(slot, generation))
            return
        if attachment is not None:
            self._loop.remove_reader(pending.sock_fd)
            del self._pending[generation]
            self._on_attached(slot, attachment)
