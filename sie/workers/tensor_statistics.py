"""Counts the steps and requests of a worker's tensor models by batch size (`sie.metrics.tensor_definitions`).

A new batch size needs about two KiB of the counter page. Once the page is half full, further sizes are counted together,
so that a client that sends every size takes no room from other metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from sie.metrics.family import Family
from sie.metrics.tensor_definitions import (
    COMPUTE_PHASES,
    OTHER_ROWS,
    TENSOR_REQUEST_TIME,
    TENSOR_REQUESTS,
    TENSOR_STEP_TIME,
    TENSOR_STEPS,
)
from sie.shm.pages import Counter, CounterPage
from sie.workers.model_api import TensorOutputs
from sie.workers.scheduling.waiting import WaitingItem

_REQUEST_PHASES: Final = ("success", "failed", "queue", *COMPUTE_PHASES)


class ComputeTimes(NamedTuple):
    """The phases of one step, in nanoseconds."""

    input_ns: int
    infer_ns: int
    output_ns: int


def compute_times(outputs: TensorOutputs, ran_ns: int, all_ns: int) -> ComputeTimes:
    """Return the phases of a step: ran_ns until its runner returned, all_ns until its replies were written."""
    infer_ns = max(0, ran_ns - outputs.input_ns - outputs.output_ns)
    return ComputeTimes(outputs.input_ns, infer_ns, outputs.output_ns + max(0, all_ns - ran_ns))


class _StepCounters(NamedTuple):
    num_steps: Counter
    phases: tuple[Counter, ...]


class _RequestCounters(NamedTuple):
    num_succeeded: Counter
    num_failed: Counter
    success: Counter
    failed: Counter
    queue: Counter
    compute: tuple[Counter, ...]


class TensorStatistics:
    """The statistics of one worker. A step of one request costs a few microseconds."""

    def __init__(self, page: CounterPage) -> None:
        self._page = page
        self._steps: dict[tuple[str, int], _StepCounters] = {}
        self._requests: dict[tuple[str, int], _RequestCounters] = {}

    def observe_step(self, model: str, items: Iterable[WaitingItem], times: ComputeTimes, started_ns: int) -> None:
        """Count a step that began at started_ns, and its requests. Each request has the step's whole times."""
        num_rows = 0
        for item in items:
            num_rows += item.num_rows
            if not item.request.has_failed:
                self._observe_success(model, item, times, max(0, started_ns - item.arrival_ns))
        num_steps, phases = self._steps_of(model, num_rows)
        num_steps.add()
        _add_times(phases, times)

    def observe_failure(self, model: str, item: WaitingItem, now_ns: int) -> None:
        """Count a request that ended with an error."""
        counters = self._requests_of(model, item.num_rows)
        counters.num_failed.add()
        counters.failed.add(max(0, now_ns - item.arrival_ns) / 1e9)

    def _observe_success(self, model: str, item: WaitingItem, times: ComputeTimes, queue_ns: int) -> None:
        counters = self._requests_of(model, item.num_rows)
        counters.num_succeeded.add()
        counters.success.add((queue_ns + sum(times)) / 1e9)
        counters.queue.add(queue_ns / 1e9)
        _add_times(counters.compute, times)

    def _steps_of(self, model: str, num_rows: int) -> _StepCounters:
        found = self._steps.get((model, num_rows))
        if found is None:
            rows = self._label_of(num_rows)
            phases = tuple(self._counter(TENSOR_STEP_TIME, model, rows, phase) for phase in COMPUTE_PHASES)
            found = _StepCounters(self._counter(TENSOR_STEPS, model, rows), phases)
            self._steps[model, num_rows] = found
        return found

    def _requests_of(self, model: str, num_rows: int) -> _RequestCounters:
        found = self._requests.get((model, num_rows))
        if found is None:
            rows = self._label_of(num_rows)
            succeeded, failed = (self._counter(TENSOR_REQUESTS, model, rows, it) for it in ("success", "failed"))
            success, fail, queue, *compute = (
                self._counter(TENSOR_REQUEST_TIME, model, rows, phase) for phase in _REQUEST_PHASES
            )
            found = _RequestCounters(succeeded, failed, success, fail, queue, tuple(compute))
            self._requests[model, num_rows] = found
        return found

    def _counter(self, family: Family, *labels: str) -> Counter:
        return self._page.counter(family.name, family.label_pairs(*labels))

    def _label_of(self, num_rows: int) -> str:
        return str(num_rows) if self._page.is_roomy else OTHER_ROWS


def _add_times(counters: tuple[Counter, ...], times: ComputeTimes) -> None:
    for counter, duration_ns in zip(counters, times, strict=True):
        counter.add(duration_ns / 1e9)
