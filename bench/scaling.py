"""Measure how this server's rate grows with its CPU workers, against how the machine's matrix products do.

The same load goes to a server with one worker of one thread, with more of them, and with one worker of as many threads, in
turn. The generator shares the cores: its processor time is measured, and the rate of a server whose workers want every
core is stated for the cores that it was left. Without that the generator would count as a fault of the workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

import click

from bench.catalog import OURS, Peer, start_sie
from bench.compare import MODEL_HELP, Comparison, compare, ratio, setup_of
from bench.contenders import Contender, Load, Turn
from bench.limits import print_ceilings
from bench.report import facts, print_facts, print_table, save

_LOADS: Final = (
    Load("1 text, 128 connections", "mixed", 1, 128),
    Load("32 texts, 8 connections", "mixed", 32, 8),
)
_COLUMNS: Final = (
    "load", "workers", "tokens/s", "per worker CPU-second", "cores: workers", "frontends", "generator", "grown, as measured",
    "generator subtracted", "by worker time", "matrix products", "of those",
)  # fmt: skip


class Crew(NamedTuple):
    """So many workers of so many threads."""

    workers: int
    threads: int

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.workers} of {self.threads} thread{'s' * (self.threads > 1)}"

    def peer(self) -> Peer[Contender]:
        """Return the server that has it."""
        flags = ("--devices", f"cpu:{self.workers}", "--threads-per-worker", str(self.threads))
        return Peer(self.name, "sie", "sie", start_sie, (OURS, *flags))


@click.command()
@click.option("--workers", multiple=True, type=int, help="Numbers of workers; by default 1, 2, 4 ... up to the cores.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Length of a turn.")
@click.option("--model", default="", help=MODEL_HELP)
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(*, workers: tuple[int, ...], rounds: int, seconds: float, model: str, is_saved: bool) -> None:
    """Measure how the rate grows with workers."""
    num_cores = len(os.sched_getaffinity(0))
    counts = sorted({1, *(workers or (*(1 << power for power in range(num_cores.bit_length())), num_cores))})
    crews = [Crew(count, 1) for count in counts if count <= num_cores]
    if num_cores > 1:
        crews.append(Crew(1, num_cores))
    with setup_of(model, "cpu", threads=1) as setup:
        known = facts(
            "Workers",
            f"{rounds} rounds of {seconds:g} s a turn, servers in turn; closed loop; texts of mixed length; medians of the rounds; "
            "a core that the generator takes is one that workers do not have",
        )
        print_facts(known)
        peers = [crew.peer() for crew in crews]
        comparison = compare(peers, _LOADS, rounds=rounds, seconds=seconds, setup=setup)
    print_scaling(comparison, crews)
    if is_saved:
        save("scaling", known, comparison.figures())


def print_scaling(comparison: Comparison, crews: Sequence[Crew]) -> None:
    """Print how each crew did under each load, and how the matrix products of as many cores grow."""
    print_ceilings(comparison.ceilings)
    rows = [_row(comparison, crew, load) for load in _LOADS for crew in crews if comparison.of(crew.name, load.name)]
    print_table(_COLUMNS, rows)
    for name, reason in comparison.absent.items():
        print(f"- {name}: {reason}")


def unhindered_rate(turn: Turn, num_wanted: int, num_cores: int) -> float:
    """Return the tokens a second of workers that want so many cores, had the generator taken none of them."""
    return turn.tokens_per_s * num_wanted / min(num_wanted, num_cores - turn.generator_cpu_s / turn.seconds)


def _row(comparison: Comparison, crew: Crew, load: Load) -> list[str]:
    turns = comparison.of(crew.name, load.name)
    flops, num_cores = comparison.ceilings.flops["bfloat16"], max(comparison.ceilings.copied)
    num_wanted = crew.workers * crew.threads
    ceiling = flops[num_wanted] / flops[1] if num_wanted in flops else float("nan")

    def growth(rate: Callable[[Turn, int], float]) -> float:
        single = comparison.of(Crew(1, 1).name, load.name)
        return ratio([rate(turn, num_wanted) for turn in turns], [rate(turn, 1) for turn in single])

    unhindered = growth(lambda turn, count: unhindered_rate(turn, count, num_cores))
    return [
        load.name, crew.name, f"{median(turn.tokens_per_s for turn in turns):,.0f}",
        f"{median(_per_worker_s(turn) for turn in turns):,.0f}",
        *(f"{median(turn.cpu_s.get(role, 0.0) / turn.seconds for turn in turns):.2f}" for role in ("worker", "frontend")),
        f"{median(turn.generator_cpu_s / turn.seconds for turn in turns):.2f}",
        f"{growth(lambda turn, _: turn.tokens_per_s):.2f}x", f"{unhindered:.2f}x",
        f"{growth(lambda turn, count: count * _per_worker_s(turn)):.2f}x", f"{ceiling:.2f}x", f"{unhindered / ceiling:.0%}",
    ]  # fmt: skip


def _per_worker_s(turn: Turn) -> float:
    return turn.tokens / turn.cpu_s["worker"]
