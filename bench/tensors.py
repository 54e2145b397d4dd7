"""Measure the identity of a tensor against a bare echo of each transport, and against Triton where it is installed.

All servers run throughout and take turns in each round, so that a busy neighbour slows them alike; a ratio is the median
of those within the rounds. Processor time is the whole server's, for one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import click

from bench.report import facts, print_facts, print_table, save
from bench.tensor_clients import Carrier, infer_message, infer_request, plain_request, run_grpc, run_http
from bench.tensor_servers import Contender, contenders

_SMALL_VALUES: Final = 16
_LARGE_VALUES: Final = 16 << 20
_COLUMNS: Final = ("server", "answers/s", "p50 ms", "p99 ms", "processor us", "sie / it", "least", "most")


class Turn(NamedTuple):
    """What a contender did in one round."""

    rate: float
    """Answers a second."""
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """Processor time for one answer."""


class Options(NamedTuple):
    """How much is measured."""

    connections: int
    rounds: int
    seconds: float
    large: int


@click.command()
@click.option(
    "--triton",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Environment with nvidia-pytriton: python3.11 -m venv DIR && DIR/bin/pip install nvidia-pytriton",
)
@click.option("--connections", default=32, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Length of a turn with small tensors.")
@click.option("--large", default=3, show_default=True, help="Tensors of 64 MiB in each turn.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(*, triton: Path | None, connections: int, rounds: int, seconds: float, large: int, is_saved: bool) -> None:
    """Measure tensors over gRPC and HTTP, small and of 64 MiB, beside a bare echo of each."""
    options = Options(connections, rounds, seconds, large)
    known = facts(
        "Tensors, there and back",
        f"{rounds} rounds of {seconds:g} s a turn ({large} tensors of 64 MiB); clients and servers share the cores; Triton "
        f"({_triton_version(triton)}): Python backend, one instance on the CPU",
    )
    print_facts(known)
    with contenders(triton) as found:
        loads = {
            f"gRPC, {_SMALL_VALUES} values, {connections} connections": _small_grpc(found, options),
            f"HTTP, {_SMALL_VALUES} values, {connections} connections": _small_http(found, options),
            "HTTP, 64 MiB, 1 connection": _large_http(found, options),
        }
    for load, turns in loads.items():
        print(f"## {load}\n")
        print_table(_COLUMNS, [_row(turns["sie"], name, own) for name, own in turns.items()])
    if is_saved:
        figures = {
            load: {name: [turn._asdict() for turn in own] for name, own in turns.items()}
            for load, turns in loads.items()
        }
        save("tensors", known, {"loads": figures})


def _small_grpc(found: dict[str, Contender], options: Options) -> dict[str, list[Turn]]:
    message = infer_message(_SMALL_VALUES)

    def take(one: Contender) -> list[float]:
        return asyncio.run(run_grpc(one.grpc_port, message, options.connections, options.seconds))

    return _rounds([one for one in found.values() if one.grpc_port], take, options.rounds)


def _small_http(found: dict[str, Contender], options: Options) -> dict[str, list[Turn]]:
    def take(one: Contender) -> list[float]:
        request = (plain_request if one.name == "Granian echo" else infer_request)(_SMALL_VALUES)
        return run_http(one.http_port, request, options.connections, options.seconds)

    return _rounds([one for one in found.values() if one.http_port], take, options.rounds)


def _large_http(found: dict[str, Contender], options: Options) -> dict[str, list[Turn]]:
    def take(one: Contender) -> list[float]:
        request = (plain_request if one.name == "Granian echo" else infer_request)(_LARGE_VALUES)
        carrier = Carrier(one.http_port, request)
        took = [carrier.run() for _ in range(options.large)]
        carrier.close()
        return took

    return _rounds([one for one in found.values() if one.http_port], take, options.rounds)


def _rounds(
    taking_part: Sequence[Contender], take: Callable[[Contender], list[float]], num_rounds: int
) -> dict[str, list[Turn]]:
    """Return each contender's turns; the first round warms up, and every second one goes the other way round."""
    turns: dict[str, list[Turn]] = {one.name: [] for one in taking_part}
    for number in range(num_rounds + 1):
        for one in taking_part if number % 2 else reversed(taking_part):
            cpu_s, began = one.cpu_s(), perf_counter()
            try:
                latencies = sorted(take(one))
            except (OSError, RuntimeError) as error:
                raise RuntimeError(f"{one.name}: {error}") from error
            count, elapsed = len(latencies), perf_counter() - began
            if number:
                p50_ms, p99_ms = (1e3 * latencies[int(share * (count - 1))] for share in (0.5, 0.99))
                turns[one.name].append(Turn(count / elapsed, p50_ms, p99_ms, 1e6 * (one.cpu_s() - cpu_s) / count))
    return turns


def _row(ours: Sequence[Turn], name: str, own: Sequence[Turn]) -> list[str]:
    """Return medians, and our rate against its own within the rounds."""
    rate, p50_ms, p99_ms, cpu_us = (median(column) for column in zip(*own, strict=True))
    ratios = [mine.rate / its.rate for mine, its in zip(ours, own, strict=True)]
    return [
        name, f"{rate:,.1f}", f"{p50_ms:.2f}", f"{p99_ms:.2f}", f"{cpu_us:,.0f}",
        *(f"{value:.2f}" for value in (median(ratios), min(ratios), max(ratios))),
    ]  # fmt: skip


def _triton_version(environment: Path | None) -> str:
    if environment is None:
        return "not measured"
    found = [
        path.name.split("-")[1] for path in environment.glob("lib/python3.*/site-packages/nvidia_pytriton-*.dist-info")
    ]
    return f"nvidia-pytriton {found[0].removesuffix('.dist')}" if found else "not measured"
