"""Decides which worker takes a request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar


class Worker(Protocol):
    """The facts about a worker: its slot, its submitted and unanswered tokens, its slowness, and whether it is late.

    slowness is 1 for the fastest worker, and 2 for one with twice its time for a token (`measure_slowness`).
    """

    slot: int
    outstanding_tokens: int
    slowness: float
    is_late: bool


class StreamWorker(Worker, Protocol):
    """A worker that can tell how many streams of a model this process has there."""

    def count_streams(self, model: str) -> int: ...


_LATE_TOKENS: Final = 1 << 60
_MOST_SLOWNESS: Final = 4.0
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
    """Return the worker that will have done its outstanding tokens first, or None without workers.

    The lowest slot wins a tie. A late worker is chosen only if all are late.
    """
    best: WorkerT | None = None
    least = 0.0
    for worker in workers:
        time = worker.outstanding_tokens * worker.slowness + (_LATE_TOKENS if worker.is_late else 0)
        if best is None or time < least or (time == least and worker.slot < best.slot):
            best, least = worker, time
    return best


def measure_slowness(paces: Sequence[float]) -> list[float]:
    """Return each worker's slowness from its measured time for a token; 0 is a worker that answered nothing yet.

    Workers share their cores with frontends, clients and other programs. With equal tokens, the one with the busiest core
    would answer last. The bound lets a worker that was slow for a moment get enough work to show that it is no longer.
    """
    fastest = min((pace for pace in paces if pace), default=0.0)
    return [min(pace / fastest, _MOST_SLOWNESS) if pace else 1.0 for pace in paces]
