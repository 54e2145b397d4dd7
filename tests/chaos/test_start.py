"""F13, F14, F40, F41: a start that cannot succeed gives the reason at once, and leaves no process behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import DENSE, MODEL, cluster
from tests.chaos.ledger import Row
from tests.process.harness import EX_CONFIG, run_to_end, start_server

STUB = ("--model", f"{MODEL}=stub:dense={DENSE}")
PYTHON_S = 1.0
"""What the interpreter and the command line's own imports may take on a busy machine before any of it begins."""


def refused(row: Row, name: str, *flags: str, prefix: tuple[str, ...] = ()) -> str:
    """Run a start that must be refused; return what it said."""
    began_s = time.monotonic()
    status, said = run_to_end(*STUB, *flags, prefix=prefix)
    took_s = time.monotonic() - began_s
    row.equals(f"{name}: exit status", status, EX_CONFIG)
    row.at_most(f"{name}: refused after", took_s, 1.0 + PYTHON_S, "s")
    return said


@pytest.mark.row("F13", "shared memory is larger than what there is")
@pytest.mark.timing
def test_f13_memory_that_is_not_there_is_refused_with_the_number(row: Row):
    said = refused(row, "64 GiB of requests", "--request-segment-bytes", str(1 << 36))
    assert "shared memory needs" in said
    assert "bytes" in said


@pytest.mark.row("F14", "/dev/shm is small, as in a container")
@pytest.mark.timing
def test_f14_dev_shm_is_not_used(row: Row):
    with cluster() as server:
        maps = [line for pid in server.pids() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        # Not what lies in the directory: other programs of this machine use it.
        files = [str(path) for pid in server.pids() for path in open_files(pid)]
    assert any("memfd:sie-" in line for line in maps)
    row.equals("mappings of /dev/shm", sum("/dev/shm" in line for line in maps), 0)
    row.equals("open files of /dev/shm", sum("/dev/shm" in file for file in files), 0)


def open_files(pid: int) -> Iterator[Path]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that ended
            yield link.readlink()


@pytest.mark.row("F40", "two servers on one port, with one runtime directory")
@pytest.mark.timing
def test_f40_a_second_instance_is_refused_and_told_of_the_first(row: Row, tmp_path: Path):
    with start_server(*STUB, "--runtime-dir", str(tmp_path)) as first:
        said = refused(row, "second instance", "--port", str(first.port), "--runtime-dir", str(tmp_path))
        assert f"pid {first.process.pid}" in said, said


@pytest.mark.row("F41", "the port is taken")
@pytest.mark.timing
def test_f41_a_taken_port_is_refused(row: Row):
    with start_server(*STUB) as first:
        said = refused(row, "taken port", "--port", str(first.port))
    assert f"cannot listen on 127.0.0.1:{first.port}" in said
