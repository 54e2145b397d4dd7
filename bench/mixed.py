"""Measure how models of one worker share it: encode, score and extract at once, then with one of them flooded.

Starts its own server on a free port, with a stub for each operation whose tokens take very different times. The load of
each model comes from a process of its own. In the table, `share` is the model's part of the time that the worker
computed, from `sie_model_busy_seconds_total`, and `wanted` what its load would take of the worker by itself.
"""

from __future__ import annotations

import argparse
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from generator import Generator, Run
from prometheus_client.parser import text_string_to_metric_families
from report import errors_text, print_header, print_table
from server import running_server
from wire import Call, http_request, make_texts

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


def main() -> None:
    args = _parse_args()
    costs = ", ".join(f"{operation} {cost} us" for operation, cost in _COSTS_US.items())
    print_header(
        "Three models of one worker",
        f"{_NUM_ITEMS} texts of about {_MIX} words a request; a token takes {costs}; open loop (Poisson, "
        f"{_OPEN_CONNECTIONS} connections), the flooded model in a closed loop over {_FLOOD_CONNECTIONS} connections; "
        f"{args.duration:g} s a run after 1 s of warm-up; generators and server share the cores",
    )
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
    with running_server(*models, "--devices", "cpu", *args.serve) as (host, port):
        run_all(host, port, loads["balanced"], 1.0)
        rows = [row for name, load in loads.items() for row in measure(host, port, name, load, args.duration)]
    print_table(_COLUMNS, rows)


def measure(host: str, port: int, name: str, load: list[Part], duration_s: float) -> list[list[str]]:
    """Run one load and return its rows of the table, one for each model."""
    before = busy_seconds(host, port)
    runs = run_all(host, port, load, duration_s)
    spent = {model: value - before.get(model, 0.0) for model, value in busy_seconds(host, port).items()}
    return [_row(name, part, runs[part.operation], spent) for part in load]


def run_all(host: str, port: int, load: list[Part], duration_s: float) -> dict[str, Run]:
    """Put all parts of a load on the server at the same time."""
    with ProcessPoolExecutor(len(load)) as pool:
        futures = {part.operation: pool.submit(run_part, host, port, part, duration_s) for part in load}
        return {operation: future.result() for operation, future in futures.items()}


def run_part(host: str, port: int, part: Part, duration_s: float) -> Run:
    """Put one model's load on the server."""
    calls = make_calls(host, part.operation)
    generator = Generator(host, port, calls)
    try:
        if part.wanted is None:
            return generator.run_closed(_FLOOD_CONNECTIONS, duration_s)
        return generator.run_open(_OPEN_CONNECTIONS, part.wanted / seconds_of(part.operation, calls), duration_s)
    finally:
        generator.close()


def make_calls(host: str, operation: str) -> list[Call]:
    """Return the requests to one operation's model, which take turns."""
    texts = make_texts(_MIX, _NUM_ITEMS * _NUM_CALLS, seed=1)
    calls: list[Call] = []
    for start in range(0, len(texts), _NUM_ITEMS):
        own = tuple(texts[start : start + _NUM_ITEMS])
        body: dict[str, Any] = {"items": [{"text": text} for text in own]}
        if operation == "score":
            body["query"] = {"text": ""}
        calls.append(Call(http_request(host, f"/v1/{operation}/stub/{operation}", body), own))
    return calls


def seconds_of(operation: str, calls: list[Call]) -> float:
    """Return what a request takes of the worker, on average."""
    num_tokens = sum(-(-len(text.encode()) // _STUB_TOKEN_BYTES) for call in calls for text in call.texts)
    return num_tokens / len(calls) * _COSTS_US[operation] / 1e6


def busy_seconds(host: str, port: int) -> dict[str, float]:
    """Return the time that the worker has spent on each model."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as page:
        metrics = text_string_to_metric_families(page.read().decode())
    return {
        sample.labels["model"]: sample.value for metric in metrics for sample in metric.samples if sample.name == _BUSY
    }


def _row(name: str, part: Part, run: Run, spent: Mapping[str, float]) -> list[str]:
    wanted = "all" if part.wanted is None else f"{part.wanted:.0%}"
    share = spent.get(f"stub/{part.operation}", 0.0) / (sum(spent.values()) or 1.0)
    times = [f"{value:.1f}" for value in run.latency_ms(50, 99, 100)]
    return [name, part.operation, wanted, f"{share:.0%}", f"{run.rate:,.0f}", *times, errors_text(run)]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration", type=float, default=4.0, help="seconds of each run")
    parser.add_argument("serve", nargs="*", help="more arguments for `sie serve`, after --")
    return parser.parse_args()


if __name__ == "__main__":
    main()
