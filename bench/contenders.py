"""Puts servers and libraries in a process behind one interface, so that one run can compare them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from bench.processes import Program
from bench.questions import Respondent
from sie.loadgen.dialects import Dialect, Rows, WrongAnswerError
from sie.loadgen.generator import Call, Generator, RefusedError, make_calls
from sie.loadgen.judge import Judge
from sie.loadgen.runs import Run
from sie.loadgen.sample_texts import make_texts, parse_mix
from sie.loadgen.target import Target, TargetError

SEED = 1
_MOST_CALLS, _FEWEST_CALLS = 32, 8
"""Different requests of a load, which take turns: the fewest where each of them is long."""
_LOCAL_TEXTS = 128
"""Different texts of a load in process."""
_LOCAL_TIMEOUT_S = 300.0
_SETTLE_S = 0.3


class Load(NamedTuple):
    """One column of the comparison."""

    name: str
    mix: str
    items: int
    connections: int
    """0: in process, where a library is handed so many texts at a time, one batch after the other."""

    def texts(self) -> list[str]:
        """Return the texts of one turn of all requests."""
        return make_texts(parse_mix(self.mix), self.num_calls * self.items, SEED)

    @property
    def num_calls(self) -> int:
        """Different requests of this load."""
        return max(_FEWEST_CALLS, _MOST_CALLS // self.items) if self.connections else _LOCAL_TEXTS // self.items


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What one contender did in one turn of one load."""

    contender: str
    load: str
    seconds: float
    texts: int
    tokens: int
    """As the texts were made: servers count them differently."""
    p50_ms: float | None = None
    p99_ms: float | None = None
    errors: dict[str, int] = {}
    cpu_s: dict[str, float] = {}
    """Processor time of the contender, by role."""
    generator_cpu_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens a second of the contender's processor time."""
        return self.tokens / max(1e-9, sum(self.cpu_s.values()))


class Contender(Protocol):
    """One side of the comparison. Idle ones are paused."""

    name: str

    def prepare(self, loads: Sequence[Load], references: dict[str, Rows]) -> float | None:
        """Warm up for every load; return the lowest cosine of its vectors with the references, None without any.

        references has the vector of each text of the loads of one text a request.
        """
        ...

    def measure(self, load: Load, seconds: float) -> Turn | None:
        """Return what it did in so many seconds; None where it has no such load. Raises WrongAnswerError."""
        ...

    def stop(self) -> None:
        """End its processes."""
        ...


class ServerContender:
    """A server, asked by the load generator in this process, which holds nothing else."""

    def __init__(self, name: str, program: Program, target: Target, dialect: Dialect) -> None:
        self.name = name
        self._program = program
        self._target = target
        self._dialect = dialect
        self._prepared: dict[str, tuple[Generator, Judge]] = {}

    def prepare(self, loads: Sequence[Load], references: dict[str, Rows]) -> float | None:
        lowest: list[float] = []
        with self._awake():
            for load in loads:
                if not load.connections:
                    continue
                mix = parse_mix(load.mix)
                calls = make_calls(
                    self._dialect, self._target, mix, num_texts=load.items, num_calls=load.num_calls, seed=SEED
                )
                generator = Generator(self._target, self._dialect.new_channel, calls)
                answers = [self._dialect.read(response) for response in generator.ask_each()]
                judge = Judge(self._dialect, [answer._replace(num_tokens=None) for answer in answers], calls)
                if references and load.items == 1:
                    lowest.append(judge.check_answers([_stacked(call, references) for call in calls]))
                generator.run_closed(load.connections, _SETTLE_S)
                self._prepared[load.name] = (generator, judge)
        return min(lowest, default=None)

    def measure(self, load: Load, seconds: float) -> Turn | None:
        if load.name not in self._prepared:
            return None
        generator, judge = self._prepared[load.name]
        with self._awake():
            generator.run_closed(load.connections, _SETTLE_S)
            before = self._program.cpu_s()
            run = generator.run_closed(load.connections, seconds)
            after = self._program.cpu_s()
        judge.check(run)
        return _turn(
            self.name, load, run, judge.num_tokens(run), {role: after[role] - before.get(role, 0.0) for role in after}
        )

    def stop(self) -> None:
        for generator, _ in self._prepared.values():
            generator.close()
        self._program.stop()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._program.resume()
        try:
            yield
        finally:
            self._program.pause()


class LocalContender:
    """A library in a process of its own, `bench/local.py` in whatever environment has it."""

    def __init__(self, name: str, program: Program, folder: Path) -> None:
        """Wait until it has loaded its model. Raises RuntimeError with its output."""
        self.name = name
        self._asked = Respondent(program, _LOCAL_TIMEOUT_S)
        self._folder = folder

    def prepare(self, loads: Sequence[Load], references: dict[str, Rows]) -> float | None:
        texts = list(references)
        for load in loads:
            if not load.connections:
                self._asked.ask(_question(load, 0))
        if not texts:
            return None
        rows = self.vectors(texts)
        expected = np.stack([references[text] for text in texts])
        return float(
            np.min(np.sum(rows * expected, 1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1))
        )

    def vectors(self, texts: list[str]) -> Rows:
        """Return the (n, d) vectors of texts."""
        path = self._folder / f"{self._asked.program.process.pid}.npy"
        self._asked.ask({"texts": texts, "vectors": str(path)})
        return np.load(path)

    def measure(self, load: Load, seconds: float) -> Turn | None:
        if load.connections:
            return None
        answer = self._asked.ask(_question(load, seconds))
        return Turn(
            contender=self.name, load=load.name, seconds=answer["seconds"], texts=answer["texts"], tokens=answer["tokens"],
            p50_ms=answer["p50_ms"], p99_ms=answer["p99_ms"], cpu_s={"program": answer["cpu_s"]},
        )  # fmt: skip

    def stop(self) -> None:
        self._asked.program.stop()


def await_server(target: Target, dialect: Dialect, program: Program, timeout_s: float) -> None:
    """Return when the server answers a short text. Raises RuntimeError with what it wrote."""
    calls = make_calls(dialect, target, parse_mix("12"), num_texts=1, num_calls=1)
    deadline_s, reason = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline_s and program.process.poll() is None:
        generator = Generator(target, dialect.new_channel, calls)
        try:
            generator.ask_each()
        except (TargetError, RefusedError, WrongAnswerError) as error:
            reason = str(error)
            time.sleep(0.2)
        else:
            return
        finally:
            generator.close()
    raise RuntimeError(f"not ready: {reason}\n{program.output()[-2000:]}")


def _turn(name: str, load: Load, run: Run, num_tokens: int, cpu_s: dict[str, float]) -> Turn:
    p50_ms, p99_ms = run.latency_ms(50, 99)
    return Turn(
        contender=name, load=load.name, seconds=run.elapsed_s, texts=run.num_good * load.items, tokens=num_tokens,
        p50_ms=p50_ms, p99_ms=p99_ms, errors=dict(run.errors), cpu_s=cpu_s, generator_cpu_s=run.cpu_s,
    )  # fmt: skip


def _question(load: Load, seconds: float) -> dict[str, Any]:
    return {"texts": load.texts(), "items": load.items, "seconds": seconds}


def _stacked(call: Call, references: dict[str, Rows]) -> Rows:
    return np.stack([references[text] for text in call.texts])
