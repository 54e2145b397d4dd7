"""Finds out which answers over a Unix socket were read. Its connections have no addresses, so no answer names its own.

A connection has one answer at a time, and its kernel queue is empty when that answer was read. So there are at most as
many unread answers as connections with bytes in their queues. Each such connection gets one answer, of those that were
sent since the last look. If several were sent, two may be exchanged; their sum is right (docs/decisions/074).
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterable
from typing import Final

from sie.frontend.http.backlog import measure, open_files, with_socket

_ARRIVES_NS: Final = 50_000_000
"""Granian gives an answer to the kernel within this time."""
_Connection = tuple[int, int]
"""A descriptor and its inode, which no later connection with the same descriptor has."""


class UnixBacklog:
    """One answer over a Unix socket. It counts as whole until its client has read the last of it."""

    is_nearly_read = False

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sent_ns = time.monotonic_ns()
        self.connection: _Connection | None = None

    @property
    def is_moving(self) -> bool:
        """Whether, as far as is known, every client reads its answers."""
        return self.connection is None

    def add(self, nbytes: int) -> bool:
        """Record more bytes. An answer has no limit of its own."""
        self.num_bytes += nbytes
        return False

    def measure(self) -> int:
        """Return its bytes."""
        return self.num_bytes

    def settle(self, queued: set[_Connection], now_ns: int) -> None:
        """Take a connection with queued bytes that no other answer has, or end without one."""
        if self.connection in queued:
            queued.discard(self.connection)
        elif self.connection is not None:
            self.num_bytes = 0
        elif queued:
            self.connection = queued.pop()
        elif now_ns - self._sent_ns > _ARRIVES_NS:
            self.num_bytes = 0

    def cut(self) -> None:
        """Shut the connection down, unless its descriptor is another's by now."""
        if self.connection is None:
            return
        try:
            copy = os.dup(self.connection[0])  # keeps the connection while it is checked
        except OSError:
            return
        try:
            if os.fstat(copy).st_ino == self.connection[1]:
                with_socket(copy, lambda sock: sock.shutdown(socket.SHUT_RDWR))
        finally:
            os.close(copy)


def settle(answers: Iterable[UnixBacklog]) -> None:
    """Look at the connections, and end the answers that were read."""
    queued, now_ns = set(_queued()), time.monotonic_ns()
    for answer in sorted(answers, key=lambda answer: answer.connection is None):  # those with a connection first
        answer.settle(queued, now_ns)


def _queued() -> Iterable[_Connection]:
    for fd in open_files():
        if with_socket(fd, _is_accepted) and (state := measure(fd)) is not None and state.queued:
            try:
                about = os.fstat(fd)
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(about.st_mode):
                yield fd, about.st_ino


def _is_accepted(sock: socket.SocketType) -> bool:
    """Whether a socket is the server's end of a connection to a path."""
    is_unix = sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_UNIX
    return is_unix and bool(sock.getsockname()) and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
