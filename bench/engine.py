"""Measure what the wire costs: this server under load, and the same engine in a process without a server, in turn.

Both get the same texts as texts, so tokenising is on both sides. The figure to judge by is tokens per second of
processor time, which a busy neighbour changes little.
"""

from __future__ import annotations

from statistics import median
from typing import Final

import click

from bench.catalog import CONTENDERS, OURS
from bench.compare import MODEL_HELP, Comparison, compare, setup_of
from bench.contenders import Load, Turn
from bench.limits import print_ceilings
from bench.report import facts, print_facts, print_table, save

ENGINE: Final = "sie's engine bf16"
LOADS: Final = (
    Load("in process", "mixed", 128, 0),
    Load("1 text, 32 connections", "mixed", 1, 32),
    Load("1 text, 128 connections", "mixed", 1, 128),
    Load("32 texts, 8 connections", "mixed", 32, 8),
)
_COLUMNS = (
    "load", "tokens/s", "per CPU-second", "of the engine", "per worker CPU-second", "of one core's bf16 ceiling",
    "frontend us/text", "generator us/text",
)  # fmt: skip


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="Length of a turn.")
@click.option("--model", default="", help=MODEL_HELP)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(rounds: int, seconds: float, model: str, device: str, is_saved: bool) -> None:
    """Compare this server with its own engine in a process."""
    with setup_of(model, device, threads=1) as setup:
        known = facts(
            "The server and its engine",
            f"{rounds} rounds of {seconds:g} s a turn; closed loop; texts of mixed length; the engine has one thread; medians "
            "of the rounds; tokens per second of processor time of all processes of the server",
        )
        print_facts(known)
        peers = [peer for peer in CONTENDERS if peer.name in {OURS, ENGINE}]
        comparison = compare(peers, LOADS, rounds=rounds, seconds=seconds, setup=setup)
    print_ceilings(comparison.ceilings)
    print_table(_COLUMNS, [_row(comparison, load) for load in LOADS])
    for name, reason in comparison.absent.items():
        print(f"- {name}: {reason}")
    if is_saved:
        save("engine", known, comparison.figures())


def _row(comparison: Comparison, load: Load) -> list[str]:
    engine = median([turn.tokens_per_cpu_s for turn in comparison.of(ENGINE, LOADS[0].name)] or [float("nan")])
    turns = comparison.of(OURS, load.name) or comparison.of(ENGINE, load.name)
    per_cpu_s = median(turn.tokens_per_cpu_s for turn in turns)
    per_worker_s = median(turn.tokens / _worker_s(turn) for turn in turns)
    return [
        load.name, f"{median(turn.tokens_per_s for turn in turns):,.0f}", f"{per_cpu_s:,.0f}",
        f"{per_cpu_s / engine:.0%}", f"{per_worker_s:,.0f}", f"{comparison.share_of_ceiling(per_worker_s, 1):.0%}",
        f"{median(turn.cpu_s.get('frontend', 0.0) / turn.texts for turn in turns) * 1e6:.1f}",
        f"{median(turn.generator_cpu_s / turn.texts for turn in turns) * 1e6:.1f}",
    ]  # fmt: skip


def _worker_s(turn: Turn) -> float:
    """Return the processor time of the part that computes."""
    return max(1e-9, turn.cpu_s.get("worker", turn.cpu_s.get("program", 0.0)))
