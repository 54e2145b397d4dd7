"""Compiles grammars on threads beside the step loop, so that a hard one delays only its own request."""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from sie.runtime.logs import get_logger
from sie.values.errors import Internal, SieError
from sie.workers.generation.grammar import refused
from sie.workers.generation.sequences import Job
from sie.workers.model_api import GenerateRunner, Matcher

_log = get_logger(__name__)
_MAX_THREADS: Final = 4
"""The library cannot be stopped: a grammar that never compiles keeps its thread, and the other threads continue."""

Compiled = list[Matcher] | SieError


class _Task(NamedTuple):
    job: Job
    runner: GenerateRunner
    on_done: Callable[[Job, Compiled], None]


class Compiler:
    """Compiles the grammars of one worker on threads, and queues the rest. Its methods run in the loop's thread."""

    def __init__(self, timeout_s: float) -> None:
        """Allow each grammar timeout_s from the time when its model's vocabulary has been read."""
        self._timeout_s = timeout_s
        self._waiting: deque[_Task] = deque()
        self._under_way: dict[Job, tuple[_Task, float]] = {}
        """Each with its deadline, CLOCK_MONOTONIC; without one while it waits for its model's vocabulary."""
        self.num_threads = 0
        self._done: queue.SimpleQueue[tuple[Job, Compiled | None]] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable: call `collect`."""

    def __bool__(self) -> bool:
        """Whether `tend` has work to do."""
        return bool(self._under_way or self._waiting)

    def add(self, job: Job, runner: GenerateRunner, on_done: Callable[[Job, Compiled], None]) -> None:
        """Compile a job's grammar; `collect` or `tend` calls on_done(job, matchers or error) at most once.

        The job's request may have ended by then. If it ends before compilation starts, on_done is not called.
        """
        self._waiting.append(_Task(job, runner, on_done))
        self._start_next()

    def collect(self, now_ns: int) -> None:
        """Hand over the compiled grammars."""
        os.eventfd_read(self.event_fd)
        while not self._done.empty():
            job, compiled = self._done.get()
            if compiled is None:  # its compilation starts now
                if job in self._under_way:
                    self._under_way[job] = self._under_way[job][0], now_ns + self._timeout_s * 1e9
                continue
            self.num_threads -= 1
            task, _ = self._under_way.pop(job, (None, 0))
            if task is not None:
                task.on_done(job, compiled)
        self._start_next()

    def tend(self, now_ns: int) -> None:
        """Fail the grammars that have taken too long."""
        for task, until_ns in list(self._under_way.values()):
            if until_ns <= now_ns:
                del self._under_way[task.job]
                text = f"it did not compile within grammar_timeout_s ({self._timeout_s:g} s)"
                task.on_done(task.job, refused(text))

    def _start_next(self) -> None:
        while self._waiting and self.num_threads < _MAX_THREADS:
            task = self._waiting.popleft()
            if task.job.request.ended:
                continue
            self.num_threads += 1
            self._under_way[task.job] = task, math.inf  # the request's own deadline ends a longer wait
            threading.Thread(target=self._compile, args=(task.job, task.runner), name="grammar", daemon=True).start()

    def _compile(self, job: Job, runner: GenerateRunner) -> None:
        compiled: Compiled
        try:
            task = job.task
            runner.prepare_grammars()
            self._tell(job, None)
            first = runner.compile_grammar(task.grammar_kind, task.grammar)
            compiled = [first, *(first.fork() for _ in range(1, task.num_choices))]
        except SieError as error:
            compiled = error
        except Exception:  # an error of the library on a client's grammar
            _log.exception("a grammar for %s could not be compiled", runner.card.id)
            compiled = Internal("internal error while a grammar was compiled")
        self._tell(job, compiled)

    def _tell(self, job: Job, compiled: Compiled | None) -> None:
        self._done.put((job, compiled))
        os.eventfd_write(self.event_fd, 1)
