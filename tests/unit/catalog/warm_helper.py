"""Runs the prepare helper many times at the price of one start: a warm process forks a child for each run.

`python warm_helper.py MODULE...` imports the helper and the modules, then reads a `Run` as JSON from each line of
standard input and answers each with the exit status of its child. A child has the environment of its run alone, so no
module that reads the environment when it is imported may be among the modules.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sie.catalog import prepare
from sie.runtime import confined

_DEADLINE_S = 60


class Run(msgspec.Struct, frozen=True):
    """One run: the helper's argument, its environment, and the file for its standard output."""

    request: str
    environment: dict[str, str]
    output: str


class WarmHelper:
    """The warm process, as its tests see it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(self, run: Run) -> int:
        """Return the exit status of the helper."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(run) + b"\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextlib.contextmanager
def start_warm_helper(*modules: str, **environment: str) -> Iterator[WarmHelper]:
    """Yield a warm helper with these modules, imported in this environment."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.unit.catalog.warm_helper", *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**kept, **environment},
        cwd=Path(__file__).parents[3],
    ) as process:
        yield WarmHelper(process)


def _run_in_child(run: Run) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 70
    try:
        signal.alarm(_DEADLINE_S)
        os.environ.clear()
        os.environ.update(run.environment)
        os.dup2(os.open(run.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        confined.give_up_privileges()
        status = prepare.main([run.request])
    finally:
        os._exit(status)  # whatever happened: the loop below is the parent's


def _serve(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        answers.write(b"%d\n" % _run_in_child(msgspec.json.decode(line, type=Run)))


if __name__ == "__main__":
    _serve(sys.argv[1:])
