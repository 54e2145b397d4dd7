"""Runs loads one at a time, each on a thread beside the step loop. Knows no model, adapter or message.

The loop never waits for a load. A finished load waits here and signals an eventfd. The loop collects it on its own
thread, so states change only between steps.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from sie.workers.loading.states import LoadEvent, LoadState, next_state


class Loadable(Protocol):
    """Something to load. A load that is not QUEUED any more when its turn comes was cancelled, and is skipped."""

    state: LoadState


LoadT = TypeVar("LoadT", bound=Loadable)


class LoadQueue(Generic[LoadT]):
    """The loads of one kind that wait, and the one that runs."""

    def __init__(self, name: str, run: Callable[[LoadT], object], fail: Callable[[LoadT, Exception], object]) -> None:
        """Name the threads. run loads on a thread and returns the result to collect; fail makes one of an error."""
        self._name = name
        self._run = run
        self._fail = fail
        self._waiting: deque[LoadT] = deque()
        self._thread = threading.Thread()
        self._is_busy = False
        self._results: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable: call `collect`."""

    def add(self, load: LoadT) -> None:
        """Run a load after those that wait."""
        self._waiting.append(load)
        self._start_next()

    def post(self, result: object, *, is_end: bool = False) -> None:
        """Let the loop collect a result. Any thread may call this. is_end: the running load ends with it."""
        self._results.put((result, is_end))
        os.eventfd_write(self.event_fd, 1)

    def collect(self) -> Iterator[Any]:
        """Yield the results that have come, then start the next load."""
        os.eventfd_read(self.event_fd)
        while not self._results.empty():
            result, is_end = self._results.get()
            if is_end:
                self._is_busy = False
            yield result
            del result
        self._start_next()

    def join(self) -> None:
        """Let the thread of a load that was just collected end: it may still refer to the result."""
        if not self._is_busy and self._thread.is_alive():
            self._thread.join()

    def _start_next(self) -> None:
        while self._waiting and not self._is_busy:
            load = self._waiting.popleft()
            if load.state is LoadState.QUEUED:
                load.state = next_state(load.state, LoadEvent.START)
                self._is_busy = True
                self._start_thread(load)

    def _start_thread(self, load: LoadT) -> None:
        """Run a load on a thread that ends with it.

        A permanent thread would keep its OpenMP team. With more threads than cores libgomp stops spinning, and every
        step of the loop's own thread took twice as long.
        """
        self._thread = threading.Thread(target=self._load, args=(load,), name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # for example a thread limit
            self.post(self._fail(load, error), is_end=True)

    def _load(self, load: LoadT) -> None:
        self.post(self._run(load), is_end=True)
