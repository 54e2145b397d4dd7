"""Decides which worker takes a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, TypeVar


class Worker(Protocol):
    """What is known of a worker: its number, the tokens submitted to it and not yet answered, and whether it is late."""

    slot: int
    outstanding_tokens: int
    is_late: bool


_LATE_TOKENS: Final = 1 << 60
WorkerT = TypeVar("WorkerT", bound=Worker)


def choose_worker(workers: Iterable[WorkerT]) -> WorkerT | None:
    """Return the worker with the fewest outstanding tokens, the lowest slot of equals; None when there is none.

    A late worker is chosen only if all are late.
    """
    best: WorkerT | None = None
    fewest = 0
    for worker in workers:
        tokens = worker.outstanding_tokens + (_LATE_TOKENS if worker.is_late else 0)
        if best is None or tokens < fewest or (tokens == fewest and worker.slot < best.slot):
            best, fewest = worker, tokens
    return best
