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
    """A worker that can tell whether its cores are free to lend, and how many streams of a model this process has there."""

    @property
    def is_free(self) -> bool: ...

    def count_streams(self, model: str) -> int: ...


_LATE_TOKENS: Final = 1 << 60
_MOST_SLOWNESS: Final = 4.0
_MOST_GATHERED_TOKENS: Final = 8192
"""About a dozen streams with prompts of 500 tokens. Prompts are bound by products, which workers share as well apart."""
WorkerT = TypeVar("WorkerT", bound=Worker)
StreamWorkerT = TypeVar("StreamWorkerT", bound=StreamWorker)


def choose_for_stream(
    workers: Sequence[StreamWorkerT], model: str, *, most_together: int, num_tokens: int, max_tokens: int
) -> StreamWorkerT | None:
    """Return the worker for a stream of num_tokens: the one that runs most of a model's streams, if it may have another.

    A step reads all weights, however few its rows, and lent cores share its work. So streams together take less time than
    the same streams apart, while each busy worker has a free one to borrow from. Fewer than most_together gather, and
    at most max_tokens. Otherwise `choose_worker` chooses.
    """
    best: StreamWorkerT | None = None
    most = surplus = 0  # of free workers over busy ones
    for worker in workers if most_together > 1 else ():
        if worker.is_free:
            surplus += 1
            continue
        surplus -= 1
        count = 0 if worker.is_late else worker.count_streams(model)
        if most < count < most_together and worker.outstanding_tokens + num_tokens <= max_tokens:
            best, most = worker, count
    return choose_worker(workers) if best is None or surplus < 0 else best


def max_gathered_tokens(cache_tokens: int) -> int:
    """Return how many tokens of streams one worker may have while others are free. cache_tokens: 0 if it is unknown.

    Half of the key/value cache: answers may become longer than expected, and a sequence without a block is read again.
    """
    return min(_MOST_GATHERED_TOKENS, cache_tokens // 2) if cache_tokens else _MOST_GATHERED_TOKENS


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
