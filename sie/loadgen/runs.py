"""The results of one run, and the figures read from them."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sie.loadgen.channels import Response
from sie.loadgen.histogram import Histogram


class Sample(NamedTuple):
    """One good answer, kept to be judged after the run."""

    call: int
    """Which of the generator's calls it answers."""
    latency_ns: int
    response: Response


class Run:
    """What one run brought: the latencies of good answers, everything else by its kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.latencies = Histogram()
        """From when a request was due to the last byte of its answer."""
        self.num_good = 0
        """Good answers."""
        self.errors: Counter[str] = Counter()
        self.first_error = ""
        """What the first bad answer said."""
        self.samples: list[Sample] = []
        self.call_counts: Counter[int] = Counter()
        self.elapsed_s = 0.0
        self.cpu_s = 0.0
        """What this process itself used."""
        self.lateness = Histogram()
        """Open loop: by how much sending was late although a connection was free, the generator's own error."""

    @property
    def num_errors(self) -> int:
        """Requests without a good answer."""
        return self.errors.total()

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return self.num_good / self.elapsed_s

    @property
    def cpu_share(self) -> float:
        """Part of one core that the generator used."""
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
        """Return the errors by kind, or 0."""
        return ", ".join(f"{count:,} x {kind}" for kind, count in self.errors.most_common()) or "0"
