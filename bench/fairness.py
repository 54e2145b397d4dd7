"""Measure how models of one worker share it: encode, score and extract at once, then with one of them flooded.

Starts its own server on a free port, with a stub for each operation whose tokens take very different times. The load of
each model comes from a process of its own. In the table, `share` is the model's part of the time that the worker
computed, from `sie_model_busy_seconds_total`, and `wanted` what its load would take of the worker by itself.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import click
from prometheus_client.parser import text_string_to_metric_families

from bench.report import facts, print_facts, print_table
from bench.server import running_server
from sie.loadgen.generator import Call, Generator, make_calls
from sie.loadgen.plan import make_dialect
from sie.loadgen.runs import Run
from sie.loadgen.sample_texts import parse_mix
from sie.loadgen.target import parse_target

_COSTS_US = {"encode": 10, "score": 100, "extract": 500}
"""What a token of each operation's model takes."""
_MIX = "12"
_NUM_ITEMS = 4
_NUM_CALLS = 64
_STUB_TOKEN_BYTES = 4
_BALANCED = 0.25
"""Each model's part of the worker where all of them have the same."""
_QUIET = 0.1
"""Part of the worker that a model wants while another one is flooded."""
_FLOOD_CONNECTIONS = 64
_OPEN_CONNECTIONS = 32
_BUSY = "sie_model_busy_seconds_total"
_COLUMNS = ("load", "model", "wanted", "share", "answers/s", "p50 ms", "p99 ms", "max ms", "errors")


class Part(NamedTuple):
    """The load of one model; wanted None floods it: a closed loop over many connections."""

    operation: str
    wanted: float | None


@click.command()
@click.option("--seconds", default=4.0, show_default=True, help="Length of a run.")
@click.argument("serve", nargs=-1)
def main(seconds: float, serve: tuple[str, ...]) -> None:
    """Measure what part of a worker each of three models gets. SERVE: more arguments for `sie serve`, after --."""
    costs = ", ".join(f"{operation} {cost} us" for operation, cost in _COSTS_US.items())
    known = facts(
        "Three models of one worker",
        f"{_NUM_ITEMS} texts of {_MIX} words a request; a token takes {costs}; open loop (Poisson, "
        f"{_OPEN_CONNECTIONS} connections), the flooded model in a closed loop over {_FLOOD_CONNECTIONS} connections; "
        f"{seconds:g} s a run after 1 s of warm-up; generators and server share the cores",
    )
    print_facts(known)
    specs = [("encode", "dense=16"), ("score", "score"), ("extract", "extract")]
    models = [
        word
        for operation, output in specs
        for word in ("--model", f"stub/{operation}=stub:{output},per_token_us={_COSTS_US[operation]}")
    ]
    loads = {"balanced": [Part(operation, _BALANCED) for operation in _COSTS_US]} | {
        f"{busy} flooded": [Part(operation, None if operation == busy else _QUIET) for operation in _COSTS_US]
        for busy in _COSTS_US
    }
    with running_server(*models, "--devices", "cpu", *serve) as server:
        run_all(server.target.url, loads["balanced"], 1.0)
        rows = [row for name, load in loads.items() for row in measure(server.target.url, name, load, seconds)]
    print_table(_COLUMNS, rows)


def measure(url: str, name: str, load: list[Part], seconds: float) -> list[list[str]]:
    """Run one load and return its rows of the table, one for each model."""
    before = busy_seconds(url)
    runs = run_all(url, load, seconds)
    spent = {model: value - before.get(model, 0.0) for model, value in busy_seconds(url).items()}
    return [_row(name, part, runs[part.operation], spent) for part in load]


def run_all(url: str, load: list[Part], seconds: float) -> dict[str, Run]:
    """Put all parts of a load on the server at the same time."""
    with ProcessPoolExecutor(len(load)) as pool:
        futures = {part.operation: pool.submit(run_part, url, part, seconds) for part in load}
        return {operation: future.result() for operation, future in futures.items()}


def run_part(url: str, part: Part, seconds: float) -> Run:
    """Put one model's load on the server."""
    target, dialect = parse_target(url), make_dialect(f"sie-{part.operation}", f"stub/{part.operation}", "binary")
    calls = make_calls(dialect, target, parse_mix(_MIX), num_texts=_NUM_ITEMS, num_calls=_NUM_CALLS)
    generator = Generator(target, dialect.new_channel, calls)
    try:
        if part.wanted is None:
            return generator.run_closed(_FLOOD_CONNECTIONS, seconds)
        return generator.run_open(_OPEN_CONNECTIONS, part.wanted / seconds_of(part.operation, calls), seconds)
    finally:
        generator.close()


def seconds_of(operation: str, calls: list[Call]) -> float:
    """Return what a request takes of the worker, on average."""
    num_tokens = sum(-(-len(text.encode()) // _STUB_TOKEN_BYTES) for call in calls for text in call.texts)
    return num_tokens / len(calls) * _COSTS_US[operation] / 1e6


def busy_seconds(url: str) -> dict[str, float]:
    """Return the time that the worker has spent on each model."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
        metrics = text_string_to_metric_families(page.read().decode())
    return {
        sample.labels["model"]: sample.value for metric in metrics for sample in metric.samples if sample.name == _BUSY
    }


def _row(name: str, part: Part, run: Run, spent: Mapping[str, float]) -> list[str]:
    wanted = "all" if part.wanted is None else f"{part.wanted:.0%}"
    share = spent.get(f"stub/{part.operation}", 0.0) / (sum(spent.values()) or 1.0)
    times = [f"{value:.1f}" for value in run.latency_ms(50, 99, 100)]
    return [name, part.operation, wanted, f"{share:.0%}", f"{run.rate:,.0f}", *times, run.errors_text()]
