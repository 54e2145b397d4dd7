"""Measure the memory of CPU workers that share a model's weights, and the time of a start and of a worker's restart.

Each model is served by workers with copies of their own, then with shared weights: from an empty folder, and again from
the file that the first start left. Memory is proportional (PSS): what two processes map counts half for each.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import msgspec
import psutil

from bench.checkpoint import packaged_gemma
from bench.random_models import SHAPES, write_random_model
from bench.report import ROOT, facts, print_facts, print_table, save
from bench.server import Server, running_server
from sie.config.bundled import BUNDLED_PACKAGE

_METHOD: Final = (
    "each row starts `sie serve` anew, sends the requests, and reads smaps_rollup of the workers; a restart is SIGKILL to the "
    "only worker of a server, until the answer to a request sent right after"
)
_MODELS: Final = ("minilm", "bert-base", "gemma-3-270m")
_GEMMA: Final = "gemma-3-270m"
_NUM_REQUESTS: Final = 16
_TIMEOUT_S: Final = 120.0
_LOADED: Final = "  loaded: "
"""In a line of the server's log, once for each worker."""
_MIB: Final = 1 << 20
_IDLE: Final = (
    "from sie.workers.loading import light_imports; light_imports.prepare(); import sie.workers.loading.loader;"
    "print(open('/proc/self/smaps_rollup').read())"
)
_COLUMNS: Final = ("model", "weights", "start s", "workers' PSS MiB", "of it files", "restart s", "prepared MiB")


class Row(msgspec.Struct, frozen=True):
    """One start of a server. pss_mib has a number for each worker; restart_s is None where it was not measured."""

    model: str
    weights: str
    start_s: float
    pss_mib: tuple[int, ...]
    file_mib: int
    restart_s: float | None
    prepared_mib: int


class _Setting(NamedTuple):
    name: str
    flags: tuple[str, ...]
    measures_restart: bool


@click.command()
@click.option(
    "--model", "models", multiple=True, type=click.Choice(_MODELS), help="Repeatable; all of them by default."
)
@click.option("--workers", default=2, show_default=True)
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(*, models: tuple[str, ...], workers: int, is_saved: bool) -> None:
    """Measure memory and starts."""
    known = facts(f"Memory of {workers} workers, and their starts", _METHOD)
    print_facts(known)
    idle_mib = _idle_mib()
    print(f"A process with the libraries and without a model: {idle_mib} MiB.\n", flush=True)
    rows: list[Row] = []
    for row in (row for model in models or _MODELS for row in _measure(model, workers)):
        print(f"- {', '.join(_cells(row))}", flush=True)
        rows.append(row)
    print()
    print_table(_COLUMNS, [_cells(row) for row in rows])
    if is_saved:
        save("-".join(("memory", *models)), known, {"idle_mib": idle_mib, "workers": workers, "rows": rows})


def _measure(model: str, workers: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        directory = _directory_of(model, folder)
        shared = ("--weights-dir", str(folder / "weights"))
        own = ("--no-share-weights",)
        for setting in (
            _Setting("own copies", own, measures_restart=True),
            _Setting("shared, first start", shared, measures_restart=False),
            _Setting("shared, second start", shared, measures_restart=True),
        ):
            yield _run(model, directory, setting, workers, folder)


def _run(model: str, directory: str, setting: _Setting, workers: int, folder: Path) -> Row:
    flags = ("--model", f"m={directory}", *setting.flags)
    with _started(*flags, "--devices", f"cpu:{workers}") as (server, start_s):
        _await_loads(server, workers)
        _send(server, model)
        memory = [_memory(process) for process in _workers(server)]
    restart_s = None
    if setting.measures_restart:
        with _started(*flags, "--devices", "cpu:1") as (server, _):
            _ask(server, model, 0)
            restart_s = _restart_s(server, model)
    prepared = sum(path.stat().st_size for path in (folder / "weights").glob("*.weights"))
    return Row(
        model, setting.name, start_s, tuple(pss // _MIB for pss, _ in memory), sum(file for _, file in memory) // _MIB,
        restart_s, prepared // _MIB,
    )  # fmt: skip


@contextmanager
def _started(*flags: str) -> Iterator[tuple[Server, float]]:
    """Run a server, and give the seconds until its model answered."""
    started_s = time.monotonic()
    with running_server(*flags) as server:
        yield server, time.monotonic() - started_s


def _directory_of(model: str, folder: Path) -> str:
    if model == _GEMMA:
        return str(packaged_gemma())
    bundled = str(resources.files(BUNDLED_PACKAGE) / "model")
    return write_random_model(model, bundled, folder) if model in SHAPES else bundled


def _await_loads(server: Server, count: int) -> None:
    """Wait until so many workers have loaded the model: the first one makes the server ready."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while server.program.output().count(_LOADED) < count:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all workers have loaded the model:\n{server.program.output()}")
        time.sleep(0.1)


def _send(server: Server, model: str) -> None:
    """Send requests that keep all workers busy."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: _ask(server, model, number), range(_NUM_REQUESTS)))


def _ask(server: Server, model: str, number: int) -> None:
    """Send a request and read its answer."""
    text = " ".join(f"{word} {number * 7919 + place}" for place, word in enumerate(("a ring", "serves", "words") * 12))
    path, body = "/v1/embeddings", {"model": "m", "input": text}
    if model == _GEMMA:
        path, body = "/v1/completions", {"model": "m", "prompt": text, "max_tokens": 16}
    request = urllib.request.Request(  # the server of this run
        f"http://{server.target.host}:{server.target.port}{path}", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                reply.read()
                return
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)  # no worker has the model yet


def _restart_s(server: Server, model: str) -> float:
    (worker,) = _workers(server)
    os.kill(worker.pid, signal.SIGKILL)
    started_s = time.monotonic()
    _ask(server, model, 1)
    return time.monotonic() - started_s


def _workers(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.program.process.pid).children(recursive=True)
    return [child for child in children if "sie.workers.main" in child.cmdline()]


def _memory(process: psutil.Process) -> tuple[int, int]:
    """Return a process's proportional bytes, and those of them that are pages of files."""
    return _proportional(Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii"))


def _proportional(text: str) -> tuple[int, int]:
    values = {line.split()[0]: int(line.split()[1]) << 10 for line in text.splitlines()[1:] if line}
    return values["Pss:"], values["Pss_File:"]


def _idle_mib() -> int:
    done = subprocess.run([sys.executable, "-c", _IDLE], cwd=ROOT, check=True, capture_output=True, text=True)
    return _proportional(done.stdout)[0] // _MIB


def _cells(row: Row) -> Sequence[str]:
    restart = "" if row.restart_s is None else f"{row.restart_s:.2f}"
    values: tuple[Any, ...] = (
        row.model, row.weights, f"{row.start_s:.1f}", " + ".join(map(str, row.pss_mib)), row.file_mib, restart,
        row.prepared_mib,
    )  # fmt: skip
    return [str(value) for value in values]
