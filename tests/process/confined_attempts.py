"""What a confined process tries in `test_confined.py`, by name; it answers what came of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

PARENT = os.getppid()
_HELD: list[bytes] = []


def _spin() -> None:
    while True:
        pass


def _hold() -> None:
    _HELD.append(bytes(8 << 20) * 64)


def _compute_a_while() -> None:
    until_s = time.process_time() + 0.3  # of a processor: on a busy machine the time of day alone would pass
    while time.process_time() < until_s:
        pass


ATTEMPTS: dict[str, Callable[[], object]] = {
    "read a file": lambda: Path("/etc/hostname").read_bytes(),
    "write a file": lambda: os.open("/tmp/confined", os.O_CREAT | os.O_WRONLY),
    "list a directory": lambda: list(Path("/").iterdir()),
    "connect": socket.socket,
    "start a process": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "fork": os.fork,
    "start a thread": lambda: threading.Thread(target=time.monotonic).start(),
    "signal the parent": lambda: os.kill(PARENT, signal.SIGURG),
    "look at the parent": lambda: os.sched_getaffinity(PARENT),
    "hear from nobody": os.pipe,
    "take memory": _hold,
    "compute for ever": _spin,
    "crash": os.abort,
    "see a key": lambda: os.environ["SIE_API_KEY"],
    "say much": lambda: "x" * 100_000,
    "compute for a while": _compute_a_while,
    "be itself": lambda: time.strftime("%Y"),
}


def answer(request: bytes) -> bytes:
    """Return what came of an attempt: the name of an error, or `done:` and a result."""
    try:
        return f"done: {ATTEMPTS[request.decode()]()}".encode()
    except BaseException as error:
        return type(error).__name__.encode()
