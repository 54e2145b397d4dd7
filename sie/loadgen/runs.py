"""Stores the results of one run, and computes its figures."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sie.loadgen.channels import Response
from sie.loadgen.histogram import Histogram


class Sample(NamedTuple):
    """One good answer, kept for the judge after the run."""

    call: int
    """Index of the generator's call that it answers."""
    latency_ns: int
    response: Response


class Run:
    """The results of one run: latencies of good answers, and errors by kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.latencies = Histogram()
        """Time from a request's due time to the last byte of its answer."""
        self.num_good = 0
        """Number of good answers."""
        self.errors: Counter[str] = Counter()
        self.first_error = ""
        """Text of the first bad answer."""
        self.samples: list[Sample] = []
        self.call_counts: Counter[int] = Counter()
        self.elapsed_s = 0.0
        self.cpu_s = 0.0
        """Processor time of this process."""
        self.lateness = Histogram()
        """Open loop: delay of sending while a connection was free, which is the generator's own error."""

    @property
    def num_errors(self) -> int:
        """Number of requests without a good answer."""
        return self.errors.total()

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return self.num_good / self.elapsed_s

    @property
    def cpu_share(self) -> float:
        """Share of one core that the generator used."""
        return self.cpu_s / self.elapsed_s

    @property
    def cpu_us(self) -> float:
        """Microseconds of processor time that the generator used for one request."""
        return self.cpu_s / max(1, self.num_good + self.num_errors) * 1e6

    def latency_ms(self, *percentiles: float) -> list[float]:
        """Return these percentiles of the latency; 100 is the maximum."""
        return self.latencies.percentiles_ms(percentiles)

    def goodput(self, within_ms: float) -> float:
        """Return the good answers per second that took at most within_ms."""
        return self.latencies.count_within(int(within_ms * 1e6)) / self.elapsed_s

    def errors_text(self) -> str:
        """Return how many errors of each kind there were, as text; `0` without errors."""
        return ", ".join(f"{count:,} x {kind}" for kind, count in self.errors.most_common()) or "0"
