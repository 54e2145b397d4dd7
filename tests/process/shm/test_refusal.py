"""Memory that cannot be reserved is refused within the first second, never a SIGBUS later."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import resource, sys
from sie.shm.segment import ReservationError, Segment
limit, nbytes, limit_bytes = getattr(resource, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
if limit == resource.RLIMIT_AS:  # what the process has already counts, and Python itself needs some room
    limit_bytes += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(limit, (limit_bytes,) * 2)
try:
    Segment.create("requests", nbytes)
except ReservationError as error:
    print(error.needed_bytes, error)
    sys.exit(78)
"""


@pytest.mark.parametrize(("limit", "limit_bytes"), [("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_AS", 16 << 20)])
def test_reservation_under_a_limit_of_the_system_names_the_bytes(limit: str, limit_bytes: int) -> None:
    nbytes = 32 << 20
    command = [sys.executable, "-c", _SCRIPT, limit, str(nbytes), str(limit_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 78, done.stderr
    assert done.stdout.startswith(f"{nbytes} cannot reserve {nbytes} bytes for requests")
