"""Compares contenders: they take turns under each load, round after round, so that a busy neighbour slows all of them."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import click
import msgspec

from bench.catalog import REFERENCE, Peer, S, Setup
from bench.contenders import Contender, Load, LocalContender, Turn
from bench.limits import Ceilings, as_figures, linear_flop_per_token, measure_ceilings
from bench.random_models import SHAPES, write_random_model
from sie.config.bundled import BUNDLED_PACKAGE
from sie.loadgen.dialects import Rows, WrongAnswerError
from sie.loadgen.generator import RefusedError
from sie.loadgen.target import TargetError

MODEL_HELP = (
    f"Directory of a sentence-transformers checkpoint, or random weights: {', '.join(SHAPES)}. Else the bundled MiniLM."
)
MIN_COSINE = 0.99
"""Below this a contender's vectors are wrong, and its speed is no result. Half precision with padding reaches 0.999."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    turns: list[Turn]
    cosines: dict[str, float | None]
    """Contender: the lowest cosine of its vectors with the reference's."""
    absent: dict[str, str]
    """Contender: why it took no part."""
    ceilings: Ceilings
    flop_per_token: int

    def of(self, contender: str, load: str) -> list[Turn]:
        """Return the turns of one contender under one load."""
        return [turn for turn in self.turns if (turn.contender, turn.load) == (contender, load)]

    def names(self) -> list[str]:
        """Return the contenders that took part, in order."""
        return list(dict.fromkeys(turn.contender for turn in self.turns))

    def share_of_ceiling(self, tokens_per_s: float, num_cores: int) -> float:
        """Return the linear layers' part of what so many cores can do in bf16."""
        return tokens_per_s * self.flop_per_token / self.ceilings.flops["bfloat16"][num_cores]

    def figures(self) -> dict[str, Any]:
        """Return it for a result file."""
        return {
            "turns": self.turns,
            "min_cosine": self.cosines,
            "absent": self.absent,
            "limits": as_figures(self.ceilings),
            "flop_per_token": self.flop_per_token,
        }


def compare(
    peers: Sequence[Peer[Contender]], loads: Sequence[Load], *, rounds: int, seconds: float, setup: Setup
) -> Comparison:
    """Start everyone, measure the machine's ceilings, then give each contender its turn under each load in each round.

    Who is not installed, does not start, or answers with wrong vectors is named and left out.
    """
    absent: dict[str, str] = {}
    ceilings = measure_ceilings(1.0, setup.device)
    with all_started(peers, setup, absent) as contenders:
        references = _references(contenders, loads)
        cosines = _prepared(contenders, loads, references, absent)
        turns: list[Turn] = []
        for number in range(rounds):
            for load in loads:
                say(f"round {number + 1}: {load.name}")
                turns += _take_turns(contenders, load, seconds, absent)
        say("")
    flop_per_token = linear_flop_per_token(setup.directory)
    return Comparison(turns=turns, cosines=cosines, absent=absent, ceilings=ceilings, flop_per_token=flop_per_token)


@contextlib.contextmanager
def setup_of(model: str, device: str, threads: int) -> Iterator[Setup]:
    """Give what contenders have in common; model is a directory, a name in `SHAPES`, or empty for the bundled one."""
    with tempfile.TemporaryDirectory(prefix="sie-bench-") as folder:
        if model in SHAPES:
            model = write_random_model(model, bundled_directory(), Path(folder))
        yield Setup(model or bundled_directory(), device, threads or len(os.sched_getaffinity(0)), Path(folder))


def bundled_directory() -> str:
    """Return where the bundled model's package keeps it."""
    return str(Path(str(resources.files(BUNDLED_PACKAGE)), "model"))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over the rounds of ours over theirs; NaN without both."""
    pairs = list(zip(ours, theirs, strict=False))
    return median(mine / other for mine, other in pairs) if pairs else float("nan")


@contextlib.contextmanager
def all_started(peers: Sequence[Peer[S]], setup: Setup, absent: dict[str, str]) -> Iterator[list[S]]:
    """Give those that start, until the end of the block; the others come to stand in absent, with the reason."""
    with contextlib.ExitStack() as stack:
        started: list[S] = []
        for peer in peers:
            if setup.device not in peer.devices:
                absent[peer.name] = f"not for {setup.device}"
                continue
            if peer.python() is None:
                absent[peer.name] = "not installed"
                continue
            say(f"starting {peer.name}")
            try:
                contender = peer.start(peer, setup)
            except (RuntimeError, OSError) as error:
                absent[peer.name] = f"did not start: {error}"
                continue
            stack.callback(contender.stop)
            started.append(contender)
        yield started


def _references(contenders: Sequence[Contender], loads: Sequence[Load]) -> dict[str, Rows]:
    """Return the right vector of every text that is asked for by itself, where the reference took part."""
    for contender in contenders:
        if isinstance(contender, LocalContender) and contender.name == REFERENCE:
            texts = list(dict.fromkeys(text for load in loads if load.items == 1 for text in load.texts()))
            return dict(zip(texts, contender.vectors(texts), strict=True))
    return {}


def _prepared(
    contenders: list[Contender], loads: Sequence[Load], references: dict[str, Rows], absent: dict[str, str]
) -> dict[str, float | None]:
    """Warm everyone up, and leave those out whose vectors are wrong."""
    cosines: dict[str, float | None] = {}
    for contender in tuple(contenders):
        say(f"warming up {contender.name}")
        with leaving_out(contender, contenders, absent):
            cosine = cosines[contender.name] = contender.prepare(loads, references)
            if cosine is not None and cosine < MIN_COSINE:
                raise WrongAnswerError(f"cosine {cosine:.4f} with {REFERENCE}")
    return cosines


def _take_turns(contenders: list[Contender], load: Load, seconds: float, absent: dict[str, str]) -> list[Turn]:
    """Return one turn of each contender that has this load."""
    turns: list[Turn | None] = []
    for contender in tuple(contenders):
        with leaving_out(contender, contenders, absent):
            turns.append(contender.measure(load, seconds))
    return [turn for turn in turns if turn is not None]


@contextlib.contextmanager
def leaving_out(contender: S, contenders: list[S], absent: dict[str, str]) -> Iterator[None]:
    """Let a contender that fails take no further part, and name it with the reason."""
    try:
        yield
    except WrongAnswerError as error:
        absent[contender.name] = f"wrong answers: {error}"
        contenders.remove(contender)
    except (TargetError, RefusedError, RuntimeError, OSError) as error:
        absent[contender.name] = f"failed: {error}"
        contenders.remove(contender)


def say(what: str) -> None:
    """Show on standard error what is being done: in place of what was on a terminal, else as a line."""
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{what}", nl=False, err=True)
    elif what:
        click.echo(what, err=True)
