"""Decides which worker takes a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar


class Worker(Protocol):
    """The facts about a worker: its slot, its submitted and unanswered tokens, and whether it is late."""

    slot: int
    outstanding_tokens: int
    is_late: bool


class StreamWorker(Worker, Protocol):
    """A worker that can tell how many streams of a model this process has there."""

    def count_streams(self, model: str) -> int: ...


_LATE_TOKENS: Final = 1 << 60
WorkerT = TypeVar("WorkerT", bound=Worker)
StreamWorkerT = TypeVar("StreamWorkerT", bound=StreamWorker)


def choose_for_stream(workers: Sequence[StreamWorkerT], model: str, most_together: int) -> StreamWorkerT | None:
    """Return the worker for a stream of a model: the one that runs most of its streams, if fewer than most_together.

    A step reads all weights, however few its rows, and lent cores share its work. So streams together take less time than
    the same streams apart. Without such a worker, `choose_worker` chooses.
    """
    best: StreamWorkerT | None = None
    most = 0
    for worker in workers if most_together > 1 else ():
        count = 0 if worker.is_late else worker.count_streams(model)
        if most < count < most_together:
            best, most = worker, count
    return choose_worker(workers) if best is None else best


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
