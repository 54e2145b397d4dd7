"""Starts a server of this checkout for a benchmark and stops it again."""

from __future__ import annotations

import contextlib
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from report import ROOT

_READY = re.compile(r"ready on http://([^:\s]+):(\d+)")
_STOP_TIMEOUT_S = 40.0


@contextlib.contextmanager
def running_server(*args: str, timeout_s: float = 120.0) -> Iterator[tuple[str, int]]:
    """Run `sie serve` with args on a free port and give (host, port) once it is ready.

    Raises RuntimeError with its output when it ends, or is not ready in time.
    """
    command = [sys.executable, "-m", "sie", "serve", "--port", "0", *args]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield _await_ready(process, timeout_s)
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[str, int]:
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    output = b""
    while time.monotonic() < deadline_s:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
        chunk = process.stdout.read1(65536) if ready else b""  # type: ignore[attr-defined]
        if ready and not chunk:
            break
        output += chunk
        found = _READY.search(output.decode(errors="replace"))
        if found is not None:
            return found[1], int(found[2])
    raise RuntimeError(f"the server did not become ready:\n{output.decode(errors='replace')}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
