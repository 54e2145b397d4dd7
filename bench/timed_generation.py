"""Times how a library generates, the same way for every library.

A question is {"streams", "prompt", "tokens"}: so many prompts of so many tokens at once, and so many tokens behind each,
the likeliest ones, whatever they mean. The answer says what reading the prompts took, until each had its first token, and
what the other tokens took. Needs nothing but the standard library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

from bench.questions import Answer

_MAX_ID = 20_000
Prompts = Sequence[Sequence[int]]


class Arguments(NamedTuple):
    """What a library is loaded with."""

    model: Path
    weights: str
    threads: int


class Steps(Protocol):
    """A library that is asked for each step."""

    def read(self, prompts: Prompts) -> None:
        """Begin anew with these, and choose the first token behind each."""
        ...

    def step(self) -> None:
        """Choose one more token of each."""
        ...


class Instants(NamedTuple):
    """Seconds on the clock, and of this process's processor time."""

    wall_s: float
    cpu_s: float

    def since(self, other: Instants) -> Instants:
        """Return what has passed since another time."""
        return Instants(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


def now() -> Instants:
    """Return the time."""
    return Instants(time.perf_counter(), time.process_time())


def timed(read: Instants, read_tokens: int, decode: Instants, decode_tokens: int) -> dict[str, float]:
    """Return the answer to a question."""
    return {
        "read_s": read.wall_s, "read_cpu_s": read.cpu_s, "read_tokens": read_tokens,
        "decode_s": decode.wall_s, "decode_cpu_s": decode.cpu_s, "decode_tokens": decode_tokens,
    }  # fmt: skip


def answer_by_steps(steps: Steps, vocabulary: int) -> Answer:
    """Return what answers for a library that is asked for each step."""

    def answer(question: dict[str, Any]) -> dict[str, float]:
        prompts = make_prompts(question, vocabulary)
        began = now()
        steps.read(prompts)
        first = now()
        for _ in range(question["tokens"] - 1):
            steps.step()
        decode = now().since(first)
        num_read = question["streams"] * question["prompt"]
        return timed(first.since(began), num_read, decode, question["streams"] * (question["tokens"] - 1))

    return answer


def answer_by_requests(ask: Callable[[dict[str, Any]], int]) -> Answer:
    """Return what answers for a library that only has whole requests: once for a token each, and once for all of them.

    ask runs a question and returns the tokens of all its prompts.
    """

    def answer(question: dict[str, Any]) -> dict[str, float]:
        began = now()
        num_read = ask(question | {"tokens": 1})
        read = now().since(began)
        if question["tokens"] == 1:
            return timed(read, num_read, Instants(0.0, 0.0), 0)
        began = now()
        ask(question)
        decode = now().since(began).since(read)
        return timed(read, num_read, decode, question["streams"] * (question["tokens"] - 1))

    return answer


def make_prompts(question: dict[str, Any], vocabulary: int) -> list[list[int]]:
    """Return the token ids of a question's prompts, the same at each call."""
    random = Random(0)
    ids = range(5, min(vocabulary, _MAX_ID))
    return [random.choices(ids, k=question["prompt"]) for _ in range(question["streams"])]
