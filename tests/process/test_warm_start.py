"""A server that is a fork of the warm process is, to other processes, what a started one is."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path

from tests.process.harness import Server, eventually, start_server

FLAGS = ("--model", "stub/a=stub:dense=16", "--model", "g=stub:generate,scripted", "--agent", "--sandbox", "off")
STATUS = re.compile(r"^((?:SigBlk|SigIgn|SigCgt|NoNewPrivs|Seccomp|Cpus_allowed_list):.*)$", re.MULTILINE)


def kind(fd: Path) -> str:
    """Return what a descriptor is, without the number that tells two of them apart."""
    try:
        return re.sub(r"\d{2,}|sie-test-\w+|(run|sessions)-\w+", "", str(fd.readlink()))
    except FileNotFoundError:  # the listing itself
        return ""


def module_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]


def seen(server: Server) -> list[tuple[object, ...]]:
    """Return what others see of each process: its module, group, parent, signals, variables and descriptors."""
    pids = server.pids()
    found: list[tuple[object, ...]] = []
    for pid in pids:
        base = Path(f"/proc/{pid}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            stat = (base / "stat").read_text().rpartition(")")[2].split()
            parent = module_of(int(stat[1])) if int(stat[1]) in pids else []
            variables = sorted(
                v for v in (base / "environ").read_bytes().rstrip(b"\0").split(b"\0") if b"TEST" not in v
            )
            fds = sorted(Counter(kind(fd) for fd in (base / "fd").iterdir()).items())
            states = STATUS.findall((base / "status").read_text())
            found.append((module_of(pid), int(stat[2]) == pid, parent, states, variables, fds))
    return sorted(found)


def test_a_fork_is_seen_as_a_start_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # as torch does in a process of tests, sooner or later
    with start_server(*FLAGS) as forked, start_server(*FLAGS, is_fresh=True) as started:
        eventually(lambda: seen(forked) == seen(started), "the same view of both")
        assert len(seen(forked)) == 5
