"""Runs one measurement: takes a plan with dialect, texts and loads, and yields runs and verdicts."""

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
    """The measurement to make: closed loops by default, open loops with rates."""

    model: str
    dialect: str = "sie-encode"
    encoding: Encoding = "binary"
    texts: str = "mixed"
    """In the form of `sample_texts.parse_mix`."""
    items: int = 1
    """Texts in a request."""
    distinct: int = 128
    """Number of different requests, sent in turn."""
    seed: int = 1
    labels: tuple[str, ...] = ()
    """Labels to extract."""
    connections: tuple[int, ...] = (32,)
    """One closed loop for each; open loops use the largest."""
    rates: tuple[float, ...] = ()
    arrivals: Literal["poisson", "constant"] = "poisson"
    find_max_ms: float | None = None
    """Find the highest rate whose p99 stays below this."""
    seconds: float = 10.0
    """Length of each load."""
    warmup: float = 1.0
    """Seconds of load before the first measured one."""


class Measured(msgspec.Struct, frozen=True):
    """One load: its run, its number of tokens, and the verdict on its answers."""

    run: Run
    num_tokens: int
    verdict: Verdict
    held: bool | None = None
    """Whether a tried rate held; None if it was not a trial."""


def make_dialect(name: str, model: str, encoding: Encoding, labels: tuple[str, ...] = ()) -> Dialect:
    """Return the dialect for a name in `sie.loadgen.DIALECTS`. Raises ValueError if it lacks the encoding."""
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
    """Put every load of the plan on a server, one after another, and yield the result of each.

    Raises ValueError for an impossible plan, TargetError, RefusedError, and WrongAnswerError if answers under load
    differ from those to the same requests alone.
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
