"""Ends a frontend process: asks for a successor, and closes idle connections so that they do not delay the end.

Granian ends when its connections have. Two kinds of them never do before the time limit of their headers: one that is
accepted in the very moment of the signal, and any that wait while no accept succeeds, since its loop looks at its
listener first and at the signal second (granian 2.8, `acceptor_impl_loop`). So a process that was told to finish leaves
by itself once nothing is in flight and no client reads any more.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Final

from sie.frontend.http.backlog import TcpState, measure, open_files
from sie.runtime.logs import get_logger

_log = get_logger(__name__)
_LOOK_S: Final = 0.5
_NUM_QUIET_LOOKS: Final = 2
"""Looks in a row that must find nothing: between two of them a request may be with neither Granian nor us."""

_NUM_STUCK_LOOKS: Final = 10
"""Looks in a row in which no client reads anything. What it has not read by then is lost to it."""


class Leaving:
    """The end of one process.

    is_idle tells whether nothing is in flight; close_streams ends what would never end; in_granian tells Granian's child
    from a process that serves by itself, and hears of its end by itself.
    """

    def __init__(
        self,
        is_idle: Callable[[], bool],
        close_streams: Callable[[], None],
        drain_timeout_s: float,
        *,
        in_granian: bool,
    ) -> None:
        self._is_idle = is_idle
        self._in_granian = in_granian
        self._close_streams = close_streams
        self._drain_timeout_s = drain_timeout_s
        self._num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._looked_s = time.monotonic()
        self._until_s: float | None = None
        self._num_quiet = 0
        self._unread: dict[int, TcpState] = {}

    def begin(self) -> None:
        """Leave as soon as nothing is in flight, at the latest at the end of `drain_timeout_s`; Granian was told, too."""
        if self._in_granian and self._until_s is None:
            self._until_s = time.monotonic() + self._drain_timeout_s

    def tick(self, now_s: float) -> None:
        """Look, now and then, whether it is time to begin, or to go. Does not return from the latter."""
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        if self._until_s is None:
            self._check_files()
            return
        unread = _unread()
        self._num_quiet = self._num_quiet + 1 if self._is_idle() and unread == self._unread else 0
        self._unread = unread
        num_looks = _NUM_STUCK_LOOKS if unread else _NUM_QUIET_LOOKS
        if self._num_quiet >= num_looks or now_s >= self._until_s:
            os._exit(0)  # Granian's threads would have the last word on any other way out

    def _check_files(self) -> None:
        """Make room for a successor when the limit of open files was lowered for good.

        How many connections Granian takes was computed from the limit at the start (`sie.frontend.main`). Over the new
        one every accept fails, and Granian tries again without pause, at the price of a core.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft >= self._num_files:
            return
        if hard >= self._num_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._num_files, hard))
            return
        _log.error(
            "the limit of open files was lowered from %d to %d: finishing what was accepted, for a successor",
            self._num_files, hard,
        )  # fmt: skip
        self._num_files = 0
        self.begin()
        self._close_streams()
        # Granian's child asks its parent, which owns the listener.
        os.kill(os.getppid() if self._in_granian else os.getpid(), signal.SIGTERM)


def _unread() -> dict[int, TcpState]:
    """Return the connections whose peers have yet to take what was sent to them: then there may be more to send."""
    states = {fd: state for fd in open_files() if (state := measure(fd)) is not None}
    return {fd: state for fd, state in states.items() if state.queued}
