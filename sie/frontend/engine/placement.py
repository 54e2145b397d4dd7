"""Decides which worker takes a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, TypeVar


class Worker(Protocol):
    """The facts about a worker: its slot, its submitted and unanswered tokens, and whether it is late."""

    slot: int
    outstanding_tokens: int
    is_late: bool


_LATE_TOKENS: Final = 1 << 60
WorkerT = TypeVar("WorkerT", bound=Worker)


def choose_worker(workers: Iterable[WorkerT]) -> WorkerT | None:
    """Return the worker with the fewest outstanding tokens, or None without workers. The lowest slot wins a tie.

    A late worker is chosen only if all are late.
    """
    best: WorkerT | None = None
    fewest = 0
    for worker in workers:
        tokens = worker.outstanding_tokens + (_LATE_TOKENS if worker.is_late else 0)
        if best is None or tokens < fewest or (tokens == fewest and worker.slot < best.slot):
            best, fewest = worker, tokens
    return best
