"""Owns the way of log lines to stderr, which never waits: whoever does not read them loses them, and is told how many.

A journal that is stuck, or a pipe that nobody empties, must not stop a server. The description of stderr is shared
with whoever started it, so it is not made non-blocking: a pipe is opened anew, a socket asked each time. A file never
waits, and a terminal is a person's.
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
    """What a logging handler writes to."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class LogStream:
    """Writes whole lines, or drops them. `send` writes what it can and raises BlockingIOError when that is nothing."""

    def __init__(self, send: Callable[[bytes], int], close: Callable[[], None]) -> None:
        self._send = send
        self.close = close
        self._rest = b""
        """What is left of a line that went out in part."""
        self._num_dropped = 0

    def write(self, text: str) -> None:
        """Write one line, after a word about those before it that were dropped; or drop it, too, and count it."""
        told = f"{self._num_dropped} log lines were dropped: nobody read them\n" if self._num_dropped else ""
        # Both or neither: the short word alone would fit where lines do not, and fill the last of the room.
        self._num_dropped = 0 if self._try_send(told + text) else self._num_dropped + 1

    def flush(self) -> None:
        """Do nothing: nothing is kept but the rest of a line."""

    def _try_send(self, text: str) -> bool:
        """Send what is left of the line before, then this one; False when not a byte of this one went out."""
        line = text.encode(errors="backslashreplace")
        data = self._rest + line
        try:
            num_sent = self._send(data)
        except OSError:  # full; or the reader is gone for good, as if it did not read
            return False
        is_begun = num_sent > len(self._rest)
        self._rest = data[num_sent:] if is_begun else self._rest[num_sent:]
        return is_begun


def open_stderr() -> Stream:
    """Return stderr as a stream that never waits; where that cannot be had, stderr as it is."""
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
