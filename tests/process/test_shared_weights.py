"""CPU workers of a server are forks that map one file of weights, and a restarted worker loads from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.process.harness import DEVICE, WAIT_S, Server, eventually, start_server

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has memory of its own")


def _embed(server: Server) -> list[float]:
    body = json.dumps({"model": "m", "input": "a cat"}).encode()
    request = urllib.request.Request(f"{server.url}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        return json.loads(reply.read())["data"][0]["embedding"]


def _mapped_by(server: Server, folder: Path) -> dict[int, set[str]]:
    """Return each worker's mappings of files in the folder, with their rights."""
    found: dict[int, set[str]] = {}
    for pid in server.pids("worker"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has just ended
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found[pid] = {" ".join((line.split()[1], line.split()[-1])) for line in lines if str(folder) in line}
    return found


def _mapped_alike(server: Server, folder: Path, expected: set[str]) -> dict[int, set[str]] | None:
    found = _mapped_by(server, folder)
    return found if [*found.values()] == [expected] * 2 else None


def test_workers_map_one_file_and_a_restarted_one_does_too(minilm_directory: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    flags = ("--model", f"m={minilm_directory}", "--devices", "cpu:2", "--weights-dir", str(folder))
    with start_server(*flags) as server:
        (path,) = folder.glob("*.weights")
        expected = {f"r--s {path}"}
        before = eventually(lambda: _mapped_alike(server, folder, expected), "two mappings")
        inode, answer = path.stat().st_ino, _embed(server)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        assert _embed(server) == answer
        after = eventually(lambda: _mapped_alike(server, folder, expected), "mapped again")
        assert not before.keys() & after.keys()
        assert path.stat().st_ino == inode
        (template,) = server.pids("template")
        assert {psutil.Process(pid).ppid() for pid in (*after, template)} == {server.process.pid}
        for pid in (template, *after):
            os.kill(pid, signal.SIGKILL)
        assert _embed(server) == answer, "workers start without their template, too"
