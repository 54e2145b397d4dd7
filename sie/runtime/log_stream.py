"""Writes log lines to stderr without ever waiting. Lines that cannot be written are dropped and counted.

A stuck journal or an unread pipe must not stop a server. The file description of stderr is shared with the parent
process, so it is not made non-blocking. Instead a pipe is opened again, and a socket gets a flag with each call. A file
never blocks, and a terminal belongs to a person.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Callable
from typing import Protocol


class Stream(Protocol):
    """The interface that a logging handler writes to."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class LogStream:
    """Writes whole lines, or drops them. `send` writes what fits, and raises BlockingIOError if no byte does."""

    def __init__(self, send: Callable[[bytes], int], close: Callable[[], None]) -> None:
        self._send = send
        self.close = close
        self._rest = b""
        """The unsent rest of a partly sent line."""
        self._num_dropped = 0

    def write(self, text: str) -> None:
        """Write one line, after a note about dropped lines if there are any. If it does not fit, drop and count it."""
        told = f"{self._num_dropped} log lines were dropped: nobody read them\n" if self._num_dropped else ""
        # Both or neither: the short note alone would fit where lines do not, and use up the last space.
        self._num_dropped = 0 if self._try_send(told + text) else self._num_dropped + 1

    def flush(self) -> None:
        """Do nothing: only the rest of a line is buffered."""

    def _try_send(self, text: str) -> bool:
        """Send the rest of the last line, then this one. Return False if no byte of this one was sent."""
        line = text.encode(errors="backslashreplace")
        data = self._rest + line
        try:
            num_sent = self._send(data)
        except OSError:  # full, or the reader is gone, which counts as full
            return False
        is_begun = num_sent > len(self._rest)
        self._rest = data[num_sent:] if is_begun else self._rest[num_sent:]
        return is_begun


def open_stderr() -> Stream:
    """Return stderr as a stream that never waits, or stderr itself if that is not possible."""
    try:
        fd = sys.stderr.fileno()
        mode = os.fstat(fd).st_mode
    except (OSError, ValueError, AttributeError):  # a test's stand-in, or closed
        return sys.stderr
    if stat.S_ISSOCK(mode):
        sock = socket.socket(fileno=os.dup(fd))
        return LogStream(lambda data: sock.send(data, socket.MSG_DONTWAIT), sock.close)
    if stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return LogStream(lambda data: os.write(own, data), lambda: os.close(own))
    return sys.stderr
