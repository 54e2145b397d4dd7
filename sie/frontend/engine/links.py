"""Keeps the links to the workers of one frontend: those that take requests, and those whose end is not proven yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from sie.frontend.engine.worker_link import WorkerLink
from sie.ipc.messages import Detached, PeerFault
from sie.runtime.logs import get_logger
from sie.shm.attach import Attachment
from sie.shm.layout import ProtocolError

_log = get_logger(__name__)


class WorkerLinks:
    """All links of one engine, with the watches on their descriptors. Everything runs on the event loop.

    on_bell is called when a worker's bell rings: it reads the replies. send tells the supervisor of a broken worker.
    """

    def __init__(
        self,
        on_bell: Callable[[WorkerLink], None],
        send: Callable[[PeerFault | Detached], None],
        needs_cores: Callable[[int], bool],
    ) -> None:
        self._on_bell = on_bell
        self._send = send
        self._needs_cores = needs_cores
        self.live: dict[int, WorkerLink] = {}
        """The workers that take requests, by slot."""
        self._dying: dict[int, WorkerLink] = {}
        """The workers that were set aside, by generation."""

    def __iter__(self) -> Iterator[WorkerLink]:
        """Iterate over a copy of all links: workers may come and go meanwhile."""
        return iter([*self.live.values(), *self._dying.values()])

    def add(self, slot: int, attachment: Attachment) -> None:
        """Start to use a worker. Its replies are read whenever its bell rings."""
        link = WorkerLink(slot, attachment, self.report_fault, self._needs_cores)
        self.live[slot] = link
        loop = asyncio.get_running_loop()
        loop.add_reader(attachment.bell_fd, self._on_bell, link)
        loop.add_reader(attachment.sock_fd, self._on_socket, link)

    def set_late(self, slot: int, generation: int, running: tuple[int, ...], *, is_late: bool) -> None:
        """Record whether a worker is late. running: the requests of its late step."""
        link = self.live.get(slot)
        if link is not None and link.generation == generation:
            link.is_late, link.late_step = is_late, frozenset(running)

    def set_aside(self, link: WorkerLink) -> None:
        """Give a worker no more work; `take_dead` follows when its death is confirmed."""
        if self.live.get(link.slot) is link:
            del self.live[link.slot]
            self._dying[link.generation] = link

    def report_fault(self, link: WorkerLink, error: ProtocolError) -> None:
        """Stop reading from this worker and report it; its requests wait until the supervisor has ended it."""
        _log.error("worker-%d broke the protocol: %s", link.slot, error)
        unwatch(link)
        self.set_aside(link)
        self._send(PeerFault(link.slot))

    def take_dead(self, slot: int, generation: int) -> WorkerLink | None:
        """Remove and return the link of a worker that is proven dead, or None if this attachment is unknown."""
        link = self._dying.pop(generation, None)
        if link is None:
            link = self.live.get(slot)
            if link is None or link.generation != generation:
                return None
            del self.live[slot]
        return link

    def _on_socket(self, link: WorkerLink) -> None:
        """Read announcements. At the end of file, give the worker no more work until it is dead or attached anew."""
        try:
            if link.attachment.read_socket():
                return
        except ProtocolError as error:
            self.report_fault(link, error)
            return
        asyncio.get_running_loop().remove_reader(link.attachment.sock_fd)
        self.set_aside(link)
        self._send(Detached(link.slot, link.generation))


def unwatch(link: WorkerLink) -> None:
    """Stop watching a worker's descriptors."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(link.attachment.bell_fd)
    loop.remove_reader(link.attachment.sock_fd)
