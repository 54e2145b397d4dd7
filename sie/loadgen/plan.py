"""Runs one measurement from its plan to its figures: dialect, texts and loads in, runs and verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from sie.loadgen.arrivals import Trial, find_max_rate
from sie.loadgen.dialects import Dialect, Encoding, OpenAiEmbeddings, SieEncode, SieExtract, SieScore
from sie.loadgen.generator import Generator, make_calls
from sie.loadgen.judge import Judge, Verdict
from sie.loadgen.runs import Run
from sie.loadgen.sample_texts import parse_mix
from sie.loadgen.target import Target
from sie.loadgen.tensor_dialects import KserveGrpc, KserveHttp, TrtisGrpc, TrtisHttp


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. Closed loops by default; with rates, open ones."""

    model: str
    dialect: str = "sie-encode"
    encoding: Encoding = "binary"
    texts: str = "mixed"
    """As `texts.parse_mix` takes it."""
    items: int = 1
    """Texts in a request."""
    distinct: int = 128
    """Different requests that take turns."""
    seed: int = 1
    labels: tuple[str, ...] = ()
    """What to extract."""
    connections: tuple[int, ...] = (32,)
    """One closed loop for each; open loops have the largest."""
    rates: tuple[float, ...] = ()
    arrivals: Literal["poisson", "constant"] = "poisson"
    find_max_ms: float | None = None
    """Find the highest rate whose p99 stays below this."""
    seconds: float = 10.0
    """Of each load."""
    warmup: float = 1.0
    """Seconds of load before the first one that counts."""


class Measured(msgspec.Struct, frozen=True):
    """One load: its run, how many tokens it brought, and what comparing its answers said."""

    run: Run
    num_tokens: int
    verdict: Verdict
    held: bool | None = None
    """Whether a rate that was tried held; None where nothing was tried."""


def make_dialect(name: str, model: str, encoding: Encoding, labels: tuple[str, ...] = ()) -> Dialect:
    """Return the dialect with a name of `sie.loadgen.DIALECTS`. Raises ValueError where it has no such encoding."""
    if name == "sie-extract":
        return SieExtract(model, encoding, labels)
    if labels:
        raise ValueError(f"{name} takes no labels")
    by_name: dict[str, Callable[[str, Encoding], Dialect]] = {
        "sie-encode": SieEncode,
        "sie-score": SieScore,
        "openai": OpenAiEmbeddings,
        "kserve": KserveHttp,
        "trtis": TrtisHttp,
        "kserve-grpc": KserveGrpc,
        "trtis-grpc": TrtisGrpc,
    }
    return by_name[name](model, encoding)


def measure(target: Target, plan: Plan) -> Iterator[Measured]:
    """Put every load of the plan on a server, one after the other, and yield what each brought.

    Raises ValueError for a plan that cannot be, TargetError, RefusedError, and WrongAnswerError for answers under load
    that differ from those to the same requests alone.
    """
    dialect = make_dialect(plan.dialect, plan.model, plan.encoding, plan.labels)
    mix = parse_mix(plan.texts)
    calls = make_calls(dialect, target, mix, num_texts=plan.items, num_calls=plan.distinct, seed=plan.seed)
    generator = Generator(target, dialect.new_channel, calls)
    try:
        judge = Judge.learn(dialect, generator, calls)
        warm = generator.run_closed(max(plan.connections), plan.warmup)
        for run, held in _runs(generator, plan, warm.rate):
            yield Measured(run, judge.num_tokens(run), judge.check(run), held)
    finally:
        generator.close()


def _runs(generator: Generator, plan: Plan, closed_rate: float) -> Iterator[tuple[Run, bool | None]]:
    most, is_poisson = max(plan.connections), plan.arrivals == "poisson"

    def run_at(rate: float) -> Run:
        return generator.run_open(most, rate, plan.seconds, poisson=is_poisson)

    if plan.find_max_ms is not None:
        trials: list[Trial] = find_max_rate(run_at, plan.find_max_ms, max(plan.rates, default=closed_rate / 2))
        yield from ((trial.run, trial.held) for trial in trials)
    elif plan.rates:
        yield from ((run_at(rate), None) for rate in plan.rates)
    else:
        yield from ((generator.run_closed(count, plan.seconds), None) for count in plan.connections)
