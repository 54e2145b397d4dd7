"""Ends a frontend process: asks for a successor, and closes idle connections so that they do not delay the end.

Granian ends when its connections have ended. Two kinds of idle connections last until the time limit of their headers:
those accepted at the moment of the signal, and those that wait while accepts fail, because Granian's loop checks its
listener before the signal (granian 2.8, `acceptor_impl_loop`). So a process that was told to finish does not wait for
Granian: it exits when no request is in progress and no client still reads an answer.
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
_MARGIN_S: Final = 2 * _LOOK_S
"""The supervisor counts `drain_timeout_s` from the same message, and this process looks only now and then."""
_NUM_QUIET_LOOKS: Final = 2
"""Consecutive checks that must find nothing: between two checks a request may be with neither Granian nor us."""

_NUM_STUCK_LOOKS: Final = 10
"""Consecutive checks in which no client reads anything. After them, unread bytes are lost."""


class Leaving:
    """Ends one process when its work is done.

    is_idle returns whether no request is under way. close_streams ends streams that would never end. in_granian: the
    process is Granian's child; any other process serves by itself and handles its own SIGTERM.
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
        """Exit when no request is in progress, at the latest before `drain_timeout_s`, when the supervisor would kill it.

        Granian was told to finish, too.
        """
        if self._in_granian and self._until_s is None:
            self._until_s = time.monotonic() + max(self._drain_timeout_s - _MARGIN_S, self._drain_timeout_s / 2)

    def tick(self, now_s: float) -> None:
        """Check from time to time whether to begin or to exit. Does not return if it exits."""
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
            os._exit(0)  # on any other exit Granian's threads would decide the end

    def _check_files(self) -> None:
        """Retire for a successor if the hard limit of open files was lowered; undo a lower soft limit.

        Granian's maximum of connections was computed from the limit at the start (`sie.frontend.main`). Over the new
        limit every accept fails, and Granian retries without pause, which costs a core.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft >= self._num_files:
            return
        if hard >= self._num_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._num_files, hard))
            return
        _log.error(
            "the limit of open files was lowered from %d to %d: finishing accepted requests, then a successor takes over",
            self._num_files, hard,
        )  # fmt: skip
        self._num_files = 0
        self.begin()
        self._close_streams()
        # Granian's child asks its parent, which owns the listener.
        os.kill(os.getppid() if self._in_granian else os.getpid(), signal.SIGTERM)


def _unread() -> dict[int, TcpState]:
    """Return the connections with unread bytes; there may be more to send on them."""
    states = {fd: state for fd in open_files() if (state := measure(fd)) is not None}
    return {fd: state for fd, state in states.items() if state.queued}
