"""Compare the ways to run an encoder on one thread of this CPU: compiled, packed by torch, and sentence-transformers.

Each runs in a process of its own, without a server, on the same texts, tokenising included. Tokens a second of processor
time is the figure to judge by, which a busy neighbour changes little; beside it stands what a lone short text takes.
"""

from __future__ import annotations

from statistics import median
from typing import Final

import click

from bench.catalog import REFERENCE, Peer, start_local
from bench.compare import MODEL_HELP, Comparison, compare, setup_of
from bench.contenders import Contender, Load
from bench.limits import print_ceilings
from bench.report import facts, print_facts, print_table, save

_MIXED: Final = Load("in process", "mixed", 128, 0)
_LONE: Final = Load("1 short text, in process", "12", 1, 0)
_WAYS: Final[tuple[Peer[Contender], ...]] = tuple(
    Peer(name, "sie", package, start_local, options)
    for name, package, options in (
        ("compiled bf16", "sie", ("sie", "bfloat16")),
        ("compiled int8", "sie", ("sie", "bfloat16", "--weights", "int8")),
        ("packed by torch bf16", "sie", ("sie", "bfloat16", "--no-kernels")),
        ("sentence-transformers bf16", "sentence_transformers", ("sentence-transformers", "bfloat16")),
        ("compiled fp32", "sie", ("sie", "float32")),
        ("packed by torch fp32", "sie", ("sie", "float32", "--no-kernels")),
        (REFERENCE, "sentence_transformers", ("sentence-transformers", "float32")),
    )
)


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=2.0, show_default=True, help="Length of a turn.")
@click.option("--model", default="", help=MODEL_HELP)
@click.option("--only", multiple=True, help="Only the ways whose names begin so; may be given several times.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(*, rounds: int, seconds: float, model: str, only: tuple[str, ...], is_saved: bool) -> None:
    """Compare the ways to run an encoder on this machine's CPU."""
    with setup_of(model, "cpu", threads=1) as setup:
        known = facts(
            "Ways to run an encoder on one thread",
            f"{rounds} rounds of {seconds:g} s a turn, ways in turn; texts of mixed length, {_MIXED.items} at a time, and one "
            "text of 12 tokens at a time; medians of the rounds",
        )
        print_facts(known)
        ways = [way for way in _WAYS if not only or way.name.startswith(only)]
        comparison = compare(ways, (_MIXED, _LONE), rounds=rounds, seconds=seconds, setup=setup)
    print_ceilings(comparison.ceilings)
    columns = ("way", "tokens per CPU-second", "of one core's bf16 ceiling", "a lone text, p50 ms", "p99 ms", "cosine")
    print_table(columns, [_row(comparison, name) for name in comparison.names()])
    for name, reason in comparison.absent.items():
        print(f"- {name}: {reason}")
    if is_saved:
        save("encoder", known, comparison.figures())


def _row(comparison: Comparison, name: str) -> list[str]:
    per_cpu_s = median(turn.tokens_per_cpu_s for turn in comparison.of(name, _MIXED.name))
    lone = comparison.of(name, _LONE.name)
    times = [median(getattr(turn, field) for turn in lone) for field in ("p50_ms", "p99_ms")]
    cosine = comparison.cosines.get(name)
    return [
        name, f"{per_cpu_s:,.0f}", f"{comparison.share_of_ceiling(per_cpu_s, 1):.0%}", *(f"{value:.2f}" for value in times),
        "-" if cosine is None else f"{cosine:.5f}",
    ]  # fmt: skip
