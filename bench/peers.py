"""Compare this server with every peer that is installed, in one run: rates, latencies, vectors, processor time.

`make peers` installs the peers. Each starts once, is warmed up, and then takes its turn under each load in each round;
who is not having a turn is kept from running. The load generator is this process, which does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final

import click

from bench.catalog import CONTENDERS, OURS, Peer
from bench.compare import MODEL_HELP, Comparison, compare, ratio, setup_of
from bench.contenders import Load
from bench.limits import print_ceilings
from bench.report import facts, print_facts, print_table, save

LOADS: Final = (
    Load("1 text, 1 connection", "mixed", 1, 1),
    Load("1 text, 8 connections", "mixed", 1, 8),
    Load("1 text, 32 connections", "mixed", 1, 32),
    Load("1 text, 128 connections", "mixed", 1, 128),
    Load("32 texts, 8 connections", "mixed", 32, 8),
    Load("1 short text, 1 connection", "12", 1, 1),
    Load("1 short text, 128 connections", "12", 1, 128),
    Load("in process", "mixed", 128, 0),
)
_RATIO_COLUMNS: Final = (
    "load", "fastest peer", "tokens/s, this server to it", "p50, this server to it", "this server, of the bf16 ceiling",
    "the peer, of it",
)  # fmt: skip


@click.command()
@click.option(
    "--only", multiple=True, metavar="NAME", help="Contenders of this name, or whose names begin so; repeatable."
)
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=3.0, show_default=True, help="Length of a turn.")
@click.option("--model", default="", help=MODEL_HELP)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--threads", default=0, help="Compute threads of each peer; 0 takes one for each core.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(
    *, only: tuple[str, ...], rounds: int, seconds: float, model: str, device: str, threads: int, is_saved: bool
) -> None:
    """Compare this server with its peers."""
    with setup_of(model, device, threads) as setup:
        known = facts(
            "This server and its peers",
            f"{rounds} rounds of {seconds:g} s a turn, contenders in turn; closed loop; texts of mixed length are 60 % of "
            f"12, 30 % of 64, 10 % of 230 tokens; {setup.threads} compute threads; the generator shares the cores; medians "
            "of the rounds",
        )
        print_facts(known)
        peers = [peer for peer in CONTENDERS if not only or _is_named(peer.name, only)]
        comparison = compare(peers, LOADS, rounds=rounds, seconds=seconds, setup=setup)
    print_all(comparison, LOADS)
    if is_saved:
        save("-".join(filter(None, ("peers", Path(model).name))), known, comparison.figures())


def _is_named(name: str, wanted: tuple[str, ...]) -> bool:
    """Tell whether one of the wanted names is this one or, where it is nobody's, how this one begins."""
    names = {peer.name for peer in CONTENDERS}
    return any(name == word or (word not in names and name.startswith(word)) for word in wanted)


def print_all(comparison: Comparison, loads: Sequence[Load]) -> None:
    """Print every table of a comparison."""
    print_ceilings(comparison.ceilings)
    names = comparison.names()
    columns = [load for load in loads if any(comparison.of(name, load.name) for name in names)]
    heads = ("tokens/s (p50 / p99 ms)", *(load.name for load in columns))
    print_table(heads, [[name, *(_rate_cell(comparison, name, load) for load in columns)] for name in names])
    if rows := [row for load in columns if (row := _ratio_row(comparison, load)) is not None]:
        print_table(_RATIO_COLUMNS, rows)
    print_table(
        ("contender", "tokens per CPU-second", "of the bf16 ceiling", "generator, of a core", "errors", "cosine"),
        [_cost_row(comparison, name) for name in names],
    )
    for name, reason in comparison.absent.items():
        print(f"- {name}: {reason}")


def _rate_cell(comparison: Comparison, name: str, load: Load) -> str:
    turns = comparison.of(name, load.name)
    if not turns:
        return "-"
    rate = f"{median(turn.tokens_per_s for turn in turns):,.0f}"
    times = [(turn.p50_ms, turn.p99_ms) for turn in turns if turn.p50_ms is not None and turn.p99_ms is not None]
    return f"{rate} ({' / '.join(f'{median(column):.1f}' for column in zip(*times, strict=True))})" if times else rate


def _ratio_row(comparison: Comparison, load: Load) -> list[str] | None:
    """Return how this server stands to the fastest peer under one load; None where there is no peer."""
    own = comparison.of(OURS, load.name)
    peers: list[Peer] = [peer for peer in CONTENDERS if not peer.name.startswith(OURS + ",") and peer.name != OURS]
    rates = {
        peer.name: median(turn.tokens_per_s for turn in turns)
        for peer in peers
        if "sie's" not in peer.name and (turns := comparison.of(peer.name, load.name))
    }
    if not own or not rates:
        return None
    fastest = max(rates, key=rates.__getitem__)
    theirs = comparison.of(fastest, load.name)
    faster = ratio([turn.tokens_per_s for turn in own], [turn.tokens_per_s for turn in theirs])
    sooner = ratio([turn.p50_ms or 0.0 for turn in own], [turn.p50_ms or 1.0 for turn in theirs])
    num_cores = max(comparison.ceilings.copied)
    shares = (
        comparison.share_of_ceiling(median(turn.tokens_per_s for turn in one), num_cores) for one in (own, theirs)
    )
    return [load.name, fastest, f"{faster:.2f}x", f"{sooner:.2f}x", *(f"{share:.0%}" for share in shares)]


def _cost_row(comparison: Comparison, name: str) -> list[str]:
    """Return what a contender's tokens cost at its best load, and whether they were right."""
    turns = [turn for turn in comparison.turns if turn.contender == name]
    best = max(turns, key=lambda turn: turn.tokens_per_s)
    share = comparison.share_of_ceiling(best.tokens_per_s, max(comparison.ceilings.copied))
    generator = max(turn.generator_cpu_s / turn.seconds for turn in turns)
    num_errors = sum(sum(turn.errors.values()) for turn in turns)
    cosine = comparison.cosines.get(name)
    per_cpu_s = max(turn.tokens_per_cpu_s for turn in turns if turn.load == best.load)
    return [
        name, f"{per_cpu_s:,.0f}", f"{share:.0%}", f"{generator:.0%}", str(num_errors),
        "-" if cosine is None else f"{cosine:.5f}",
    ]  # fmt: skip
