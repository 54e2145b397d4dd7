"""Compare how fast a causal model generates: a worker's own steps, transformers, llama.cpp and mistral.rs, in one run.

Each has a process of its own and takes its turn under each load in each round; who is not having a turn is kept from
running. The engine is left out: a step is asked for as soon as the last one ends. The memory's bandwidth, measured in the
same rounds, bounds one stream: every token reads all weights.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec

from bench.catalog import Setup
from bench.checkpoint import packaged_gemma
from bench.compare import all_started, leaving_out, ratio, say
from bench.contenders import Turn
from bench.generators import GGUF, GeneratingContender, GenerationLoad, generating_peers, is_ours
from bench.report import facts, print_facts, print_table, save

_BYTES = 1 << 28
_READS = 4


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a comparison."""

    turns: list[Turn]
    read_bytes: dict[str, int]
    """Contender: bytes of weights that a step of one token reads."""
    versions: dict[str, str]
    absent: dict[str, str]
    """Contender: why it took no part, or stopped doing so."""
    bandwidths: list[float]
    """Bytes a second that all threads read from memory, in each round."""

    def rates(self, contender: str, load: str) -> list[float]:
        """Return the tokens a second of each turn."""
        return [turn.tokens_per_s for turn in self.turns if (turn.contender, turn.load) == (contender, load)]

    def names(self) -> list[str]:
        """Return the contenders that took part, in order."""
        return list(dict.fromkeys(turn.contender for turn in self.turns))

    def limit(self, contender: str) -> float:
        """Return the steps a second that the memory's bandwidth leaves it."""
        return median(self.bandwidths) / self.read_bytes[contender]


@click.command()
@click.argument("model", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--weights", multiple=True, default=("bfloat16", "int8", "int4"), show_default=True, help="Ours.")
@click.option("--streams", multiple=True, default=(1, 8), show_default=True)
@click.option("--tokens", default=33, show_default=True, help="Tokens that each stream generates.")
@click.option("--prompt", default=1024, show_default=True, help="Tokens of the prompt that is read.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=0, help="Compute threads of each; 0 takes one for each core.")
@click.option("--save", "is_saved", is_flag=True, help="Keep the figures in bench/results/.")
def main(
    *,
    model: Path | None,
    weights: tuple[str, ...],
    streams: tuple[int, ...],
    tokens: int,
    prompt: int,
    rounds: int,
    threads: int,
    is_saved: bool,
) -> None:
    """Compare generation. MODEL: a GGUF file, or a directory, which fewer peers read; else Gemma 3 270M as packaged."""
    model = model or packaged_gemma()
    threads = threads or len(os.sched_getaffinity(0))
    known = facts(
        f"Generation: {model.name}",
        f"{rounds} rounds, contenders in turn, {threads} compute threads; {tokens} tokens a stream, of which all but the first "
        f"count; a prompt of {prompt} tokens; the likeliest token each time; medians of the rounds",
    )
    print_facts(known)
    loads = [GenerationLoad(f"{count} stream{'s' * (count > 1)}", count, tokens) for count in streams]
    loads.append(GenerationLoad("prompt", 0, prompt))
    with tempfile.TemporaryDirectory(prefix="sie-bench-") as folder:
        setup = Setup(str(model.resolve()), "cpu", threads, Path(folder))
        generated = compare_generation(setup, weights, loads, rounds)
    print_generated(generated, loads)
    if is_saved:
        save("generate", known, msgspec.to_builtins(generated))


def compare_generation(
    setup: Setup, weights: tuple[str, ...], loads: Sequence[GenerationLoad], rounds: int
) -> Generated:
    """Start everyone, give each its turn under each load once to warm up, and then in each round."""
    absent: dict[str, str] = {}
    turns: list[Turn] = []
    bandwidths: list[float] = []
    peers = generating_peers(weights, is_gguf=setup.directory.endswith(GGUF))
    with all_started(peers, setup, absent) as contenders:
        known = tuple(contenders)
        for number in range(rounds + 1):
            say(f"round {number}" if number else "warming up")
            found = [turn for load in loads for turn in _take_turns(contenders, load, absent)]
            if number:
                turns += found
                bandwidths.append(_bandwidth(setup.threads))
        say("")
    return Generated(
        turns=turns, read_bytes={one.name: one.read_bytes for one in known},
        versions={one.name: one.version for one in known}, absent=absent, bandwidths=bandwidths,
    )  # fmt: skip


def _take_turns(contenders: list[GeneratingContender], load: GenerationLoad, absent: dict[str, str]) -> list[Turn]:
    turns: list[Turn] = []
    for contender in tuple(contenders):
        with leaving_out(contender, contenders, absent):
            turns.append(contender.measure(load))
    return turns


def _bandwidth(threads: int) -> float:
    """Return the most bytes a second that so many threads read from memory, of a few tries."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(_BYTES // 4)
    best_s = float("inf")
    for _ in range(_READS):
        began_s = time.perf_counter()
        numbers.sum()
        best_s = min(best_s, time.perf_counter() - began_s)
    return _BYTES / best_s


def print_generated(generated: Generated, loads: Sequence[GenerationLoad]) -> None:
    """Print every table of a comparison."""
    print(f"Memory: {median(generated.bandwidths) / 1e9:.1f} GB/s read.\n")
    names = generated.names()
    rows = [[name, *(_rate_cell(generated, name, load.name) for load in loads)] for name in names]
    print_table(("tokens/s", *(load.name for load in loads)), rows)
    peers = [name for name in names if not is_ours(name)]
    for load in loads:
        if ratios := [_ratio_row(generated, name, peers, load.name) for name in names if is_ours(name)]:
            print_table((f"{load.name}: ours to theirs", *peers), ratios)
    single = next((load.name for load in loads if load.streams == 1), None)
    if single is not None:
        columns = ("one stream", "MB read for a token", "most steps/s", "reached")
        print_table(columns, [_limit_row(generated, name, single) for name in names])
    for name, version in generated.versions.items():
        print(f"- {name}: {version}")
    for name, reason in generated.absent.items():
        print(f"- {name}: {reason}")


def _rate_cell(generated: Generated, name: str, load: str) -> str:
    rates = generated.rates(name, load)
    return f"{median(rates):,.0f}" if rates else "-"


def _ratio_row(generated: Generated, name: str, peers: Sequence[str], load: str) -> list[str]:
    own = generated.rates(name, load)
    return [name, *(f"{ratio(own, generated.rates(peer, load)):.2f}x" for peer in peers)]


def _limit_row(generated: Generated, name: str, load: str) -> list[str]:
    limit = generated.limit(name)
    rates: list[Any] = generated.rates(name, load) or [float("nan")]
    return [name, f"{generated.read_bytes[name] / 1e6:,.0f}", f"{limit:,.0f}", f"{median(rates) / limit:.0%}"]
