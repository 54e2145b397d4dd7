"""Measure the identity of a tensor against a bare echo of each transport, and against Triton where it is installed.

python bench/tensors.py
python bench/tensors.py --triton DIR       DIR: python3.11 -m venv DIR && DIR/bin/pip install nvidia-pytriton

All servers run throughout and take turns in each round, so that a busy neighbour slows them alike; a ratio is the median
of those within the rounds. Processor time is the whole server's, for one answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from tensor_clients import Carrier, infer_message, infer_request, plain_request, run_grpc, run_http
from tensor_servers import ROOT, Contender, contenders

_SMALL_VALUES: Final = 16
_LARGE_VALUES: Final = 16 << 20
_PACKAGES: Final = ("granian", "uvloop", "grpcio", "protobuf", "msgspec", "numpy")


class Turn(NamedTuple):
    """What a contender did in one round."""

    rate: float
    """Answers a second."""
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """Processor time for one answer."""


def main() -> None:
    """Run every load, print it, and keep it as JSON where that was asked for."""
    args = _parse_args()
    facts = _facts(args)
    for name, value in facts.items():
        print(f"- {name}: {value}")
    with contenders(args.triton) as found:
        loads = {
            f"gRPC, {_SMALL_VALUES} values, {args.connections} connections": _small_grpc(found, args),
            f"HTTP, {_SMALL_VALUES} values, {args.connections} connections": _small_http(found, args),
            "HTTP, 64 MiB, 1 connection": _large_http(found, args),
        }
    figures = {load: _report(load, turns) for load, turns in loads.items()}
    if args.json is not None:
        args.json.write_text(json.dumps({"facts": facts, "loads": figures}, indent=1) + "\n")


def _small_grpc(found: dict[str, Contender], args: argparse.Namespace) -> dict[str, list[Turn]]:
    message = infer_message(_SMALL_VALUES)

    def take(one: Contender) -> list[float]:
        return asyncio.run(run_grpc(one.grpc_port, message, args.connections, args.seconds))

    return _rounds([one for one in found.values() if one.grpc_port], take, args.rounds)


def _small_http(found: dict[str, Contender], args: argparse.Namespace) -> dict[str, list[Turn]]:
    def take(one: Contender) -> list[float]:
        request = (plain_request if one.name == "Granian echo" else infer_request)(_SMALL_VALUES)
        return run_http(one.http_port, request, args.connections, args.seconds)

    return _rounds([one for one in found.values() if one.http_port], take, args.rounds)


def _large_http(found: dict[str, Contender], args: argparse.Namespace) -> dict[str, list[Turn]]:
    def take(one: Contender) -> list[float]:
        request = (plain_request if one.name == "Granian echo" else infer_request)(_LARGE_VALUES)
        carrier = Carrier(one.http_port, request)
        took = [carrier.run() for _ in range(args.large)]
        carrier.close()
        return took

    return _rounds([one for one in found.values() if one.http_port], take, args.rounds)


def _rounds(
    taking_part: Sequence[Contender], take: Callable[[Contender], list[float]], num_rounds: int
) -> dict[str, list[Turn]]:
    """Return each contender's turns; the first round warms up, and every second one goes the other way round."""
    turns: dict[str, list[Turn]] = {one.name: [] for one in taking_part}
    for number in range(num_rounds + 1):
        for one in taking_part if number % 2 else reversed(taking_part):
            cpu_s, began = one.cpu_s(), time.perf_counter()
            try:
                latencies = sorted(take(one))
            except (OSError, RuntimeError) as error:
                raise RuntimeError(f"{one.name}: {error}") from error
            count, elapsed = len(latencies), time.perf_counter() - began
            if number:
                p50_ms, p99_ms = (1e3 * latencies[int(share * (count - 1))] for share in (0.5, 0.99))
                turns[one.name].append(Turn(count / elapsed, p50_ms, p99_ms, 1e6 * (one.cpu_s() - cpu_s) / count))
    return turns


def _report(load: str, turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Print a table of medians, and of our rate against each other's within the rounds; return it."""
    print(f"\n## {load}\n\n| server | answers/s | p50 ms | p99 ms | processor us | sie / it | least | most |")
    print("|---|---|---|---|---|---|---|---|")
    figures: dict[str, Any] = {}
    for name, own in turns.items():
        rate, p50_ms, p99_ms, cpu_us = (median(column) for column in zip(*own, strict=True))
        ratios = [ours.rate / its.rate for ours, its in zip(turns["sie"], own, strict=True)]
        print(
            f"| {name} | {rate:,.1f} | {p50_ms:.2f} | {p99_ms:.2f} | {cpu_us:,.0f} "
            f"| {median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"
        )
        figures[name] = {"turns": [turn._asdict() for turn in own], "sie_over_it": ratios}
    return figures


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], check=True, cwd=ROOT, capture_output=True, text=True
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit.stdout.strip(),
        "machine": f"{cpu.partition(':')[2].strip()}, {len(os.sched_getaffinity(0))} usable cores",
        "load average before": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
        "versions": ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {metadata.version(name)}" for name in _PACKAGES)]
        ),
        "triton": _triton_version(args.triton),
        "method": (
            f"{args.rounds} rounds of {args.seconds:g} s a turn ({args.large} tensors of 64 MiB); clients and servers "
            "share the cores; Triton: Python backend, one instance on the CPU"
        ),
    }


def _triton_version(environment: Path | None) -> str:
    if environment is None:
        return "not measured"
    found = [
        path.name.split("-")[1] for path in environment.glob("lib/python3.*/site-packages/nvidia_pytriton-*.dist-info")
    ]
    return f"nvidia-pytriton {found[0].removesuffix('.dist')}" if found else "not measured"


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", type=Path, help="environment with nvidia-pytriton")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn with small tensors")
    parser.add_argument("--large", type=int, default=3, help="tensors of 64 MiB in each turn")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
