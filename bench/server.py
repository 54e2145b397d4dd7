"""Starts a server of this checkout for a benchmark and stops it again."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from bench.processes import Program
from bench.report import ROOT
from sie.loadgen.target import Target, parse_target

_READY = re.compile(r"ready on (http://[^\s\"]+)")


class Server(NamedTuple):
    """A running `sie serve`."""

    program: Program
    target: Target


@contextlib.contextmanager
def running_server(*args: str, timeout_s: float = 180.0, command: str = "serve") -> Iterator[Server]:
    """Run `sie serve`, or another command, with args on a free port until the end of the block.

    Raises RuntimeError with its output when it ends, or is not ready in time.
    """
    program = Program([sys.executable, "-m", "sie", command, "--port", "0", *args], cwd=str(ROOT))
    try:
        yield Server(program, parse_target(_await_ready(program, timeout_s)))
    finally:
        program.stop()


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def _await_ready(program: Program, timeout_s: float) -> str:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and program.process.poll() is None:
        found = _READY.search(program.output())
        if found is not None:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not become ready:\n{program.output()}")
