"""Judges answers: learns each call's correct rows and tokens before the load starts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from sie.loadgen.dialects import Answer, Dialect, Rows, WrongAnswerError
from sie.loadgen.generator import Call, Generator
from sie.loadgen.runs import Run
from sie.loadgen.sample_texts import count_words

MIN_COSINE: Final = 0.999
"""A model's rows depend slightly on the rest of their batch; rows of other texts differ by far more."""
_MAX_SCORE_ERROR: Final = 0.05
"""Scores are single numbers without an angle; this is the change of a logit that half precision may cause."""


class Verdict(NamedTuple):
    """The result of comparing answers."""

    num_checked: int
    min_cosine: float
    """The lowest cosine of any row; 1 without vectors."""
    beyond_ms: float | None
    """Median latency of the samples minus the reported time in forward passes; None if it is not reported."""


class Judge:
    """Holds the correct answer to every call of a load."""

    def __init__(self, dialect: Dialect, answers: Sequence[Answer], calls: Sequence[Call]) -> None:
        """Use the answers of calls as the correct ones."""
        self._dialect = dialect
        self._answers = answers
        self._tokens = [
            answer.num_tokens if answer.num_tokens is not None else sum(map(count_words, call.texts))
            for answer, call in zip(answers, calls, strict=True)
        ]

    @classmethod
    def learn(cls, dialect: Dialect, generator: Generator, calls: Sequence[Call]) -> Judge:
        """Send every call to the server once, one after another, and learn the answers.

        Raises RefusedError, TargetError, and WrongAnswerError for an unreadable answer.
        """
        return cls(dialect, [dialect.read(response) for response in generator.ask_each()], calls)

    def check(self, run: Run) -> Verdict:
        """Compare a run's samples with the answers to the same calls sent alone.

        Raises WrongAnswerError below MIN_COSINE, because a speed with wrong answers is not a result.
        """
        lowest = 1.0
        beyond_ms: list[float] = []
        for sample in run.samples:
            answer = self._dialect.read(sample.response)
            lowest = min(lowest, lowest_cosine(answer.rows, self._answers[sample.call].rows))
            if lowest < MIN_COSINE:
                raise WrongAnswerError(f"an answer under load has cosine {lowest:.5f} with the right one")
            if answer.inference_ms is not None:
                beyond_ms.append(sample.latency_ns / 1e6 - answer.inference_ms)
        return Verdict(len(run.samples), lowest, median(beyond_ms) if beyond_ms else None)

    def check_answers(self, expected: Sequence[Rows]) -> float:
        """Return the lowest cosine of the learnt answers with the expected rows of each call's texts."""
        pairs = zip(self._answers, expected, strict=True)
        return min(lowest_cosine(answer.rows, rows) for answer, rows in pairs)

    def num_tokens(self, run: Run) -> int:
        """Return the tokens of a run's good answers, as counted by the server, or else from the generated texts."""
        return sum(self._tokens[call] * count for call, count in run.call_counts.items())


def lowest_cosine(got: Rows | None, expected: Rows | None) -> float:
    """Return the lowest cosine of two answers' rows, or 1 without rows to compare.

    Scores, rows of one number, count as 1 or 0. Raises WrongAnswerError when the shapes differ.
    """
    if got is None or expected is None:
        return 1.0
    if got.shape != expected.shape:
        raise WrongAnswerError(f"{got.shape} rows instead of {expected.shape}")
    if not got.size:
        return 1.0
    if got.shape[1] == 1:
        return float(np.all(np.abs(got - expected) <= _MAX_SCORE_ERROR * np.maximum(1.0, np.abs(expected))))
    products = np.sum(got * expected, axis=1)
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    return float(np.min(products / np.maximum(lengths, np.finfo(np.float32).tiny)))
