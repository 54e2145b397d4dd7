"""Decides which worker takes a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Worker(Protocol):
    """What is known of a worker: its number, and the tokens submitted to it and not yet answered."""

    slot: int
    outstanding_tokens: int


WorkerT = TypeVar("WorkerT", bound=Worker)


def choose_worker(workers: Iterable[WorkerT]) -> WorkerT | None:
    """Return the worker with the fewest outstanding tokens, the lowest slot of equals; None when there is none."""
    best: WorkerT | None = None
    fewest = 0
    for worker in workers:
        tokens = worker.outstanding_tokens
        if best is None or tokens < fewest or (tokens == fewest and worker.slot < best.slot):
            best, fewest = worker, tokens
    return best
