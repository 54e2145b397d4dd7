"""Tracks the frontends that have not sent their offer of memory to this worker yet, or for which it has no memory.

The step loop continues meanwhile, so a stopped frontend does not block it.
"""

from __future__ import annotations

from collections.abc import Callable

from sie.config.settings import Settings
from sie.ipc.messages import Attach
from sie.runtime.logs import get_logger
from sie.shm.large import LargeBudget
from sie.shm.layout import ProtocolError
from sie.shm.segment import ReservationError
from sie.workers.requests.frontend_link import FrontendLink, JoiningFrontend

_log = get_logger(__name__)


class Joining:
    """The frontends of one worker that are not attached yet, by slot."""

    def __init__(
        self,
        settings: Settings,
        large: LargeBudget,
        *,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        on_link: Callable[[FrontendLink], None],
    ) -> None:
        """watch(fd, handler) calls handler whenever fd is readable; on_link takes ownership of an attached frontend."""
        self._settings = settings
        self._large = large
        self._watch = watch
        self._unwatch = unwatch
        self._on_link = on_link
        self._by_slot: dict[int, JoiningFrontend] = {}

    def add(self, message: Attach, fds: list[int]) -> None:
        """Wait for a frontend's offer, and cancel an earlier attachment of its slot. Takes ownership of fds."""
        self._give_up(message.peer_slot)
        try:
            joining = JoiningFrontend(message, fds, self._settings, self._large)
        except OSError as error:
            _log.error("frontend-%d cannot be attached: %s", message.peer_slot, error)
            return
        self._by_slot[joining.slot] = joining
        self._watch(joining.sock_fd, lambda: self._finish(joining))
        self._watch(joining.pidfd, lambda: self._give_up(joining.slot))

    def retry(self) -> None:
        """Try again to attach the frontends for which there was no memory. The loop calls this once a second."""
        for joining in [joining for joining in self._by_slot.values() if joining.lacks_memory]:
            self._finish(joining)

    def _give_up(self, slot: int) -> None:
        joining = self._by_slot.get(slot)
        if joining is not None:
            self._forget(joining)
            joining.close()

    def _finish(self, joining: JoiningFrontend) -> None:
        try:
            link = joining.try_finish()
        except ReservationError as error:
            if not joining.lacks_memory:
                _log.error("frontend-%d has to wait for this worker: %s", joining.slot, error)
            joining.lacks_memory = True
            self._unwatch(joining.sock_fd)  # its offer stays readable
            return
        except (OSError, ProtocolError) as error:
            _log.warning("frontend-%d did not attach: %s", joining.slot, error)
            self._forget(joining)
            joining.close()
            return
        if link is not None:
            if joining.lacks_memory:
                _log.info("frontend-%d is attached: there is memory again", joining.slot)
            self._forget(joining)
            self._on_link(link)

    def _forget(self, joining: JoiningFrontend) -> None:
        """Stop watching a frontend. ORDER: before it is closed, see `Loop._unwatch`."""
        self._unwatch(joining.sock_fd)
        self._unwatch(joining.pidfd)
        del self._by_slot[joining.slot]
