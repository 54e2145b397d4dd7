"""Reads the frames of `/ws/status` and derives the figures of `sie ps` and `sie top`. Pure.

Source of the format: SIE API reference, section 14. Fields that are not shown are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

NONE: Final = "-"
_MIN_ELAPSED_S = 0.05
_VERSION: Final = re.compile(r"/versions(/[0-9]+)?\Z")
"""The end of a tensor model's id; without a number if it has no version to serve."""


class Process(msgspec.Struct, frozen=True):
    version: str
    uptime_seconds: int
    pid: int


class Config(msgspec.Struct, frozen=True):
    outputs: list[str] = []


class Model(msgspec.Struct, frozen=True):
    name: str
    state: str
    device: str | None = None
    memory_bytes: int = 0
    queue_depth: int = 0
    degraded: bool = False
    recovering: bool = False
    error: str | None = None
    config: Config = Config()
    generation: dict[str, int] | None = None


class Worker(msgspec.Struct, frozen=True):
    slot: int
    device: str
    state: str
    restarts: int
    busy_seconds: float
    num_steps: int
    num_tokens: int


class Gpu(msgspec.Struct, frozen=True):
    device: str
    name: str
    utilization_pct: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    healthy: bool = True
    stale: bool = False


class Histogram(msgspec.Struct, frozen=True):
    """Cumulative counts of the observations up to each bound, without those above the last bound."""

    buckets: list[float]
    counts: list[float]


class Frame(msgspec.Struct, frozen=True):
    """One frame; timestamp is the server's Unix time."""

    timestamp: float
    ready: bool
    name: str
    server: Process
    reason: str = ""
    saturated: bool = False
    config_error: str | None = None
    keys_error: str | None = None
    tls_error: str | None = None
    gpus: list[Gpu] = []
    models: list[Model] = []
    workers: list[Worker] = []
    counters: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, Histogram]] = {}

    def counted(self, name: str, model: str | None = None) -> float:
        """Return a counter's value for one model, or the sum over all models."""
        values = self.counters.get(name, {})
        return sum(values.values()) if model is None else values.get(model, 0.0)

    def shown_name(self, model: Model) -> str:
        """Return a model's name for people: a tensor model has its version only where the server has several of it."""
        base = _VERSION.sub("", model.name)
        is_one = sum(other.name.startswith(f"{base}/versions/") for other in self.models) < 2
        return base if is_one else model.name


read_frame = msgspec.json.Decoder(Frame).decode


class Window:
    """Two frames of one server: figures over the time between them. Without an older frame every rate is None."""

    def __init__(self, older: Frame | None, latest: Frame) -> None:
        self.latest = latest
        elapsed_s = latest.timestamp - older.timestamp if older is not None else 0.0
        # A restart sets every counter back.
        is_same = older is not None and older.server.pid == latest.server.pid
        self._older = older if is_same and elapsed_s >= _MIN_ELAPSED_S else None
        self._elapsed_s = elapsed_s

    def rate(self, counter: str, model: str | None = None) -> float | None:
        """Return a counter's growth a second."""
        if self._older is None:
            return None
        return (self.latest.counted(counter, model) - self._older.counted(counter, model)) / self._elapsed_s

    def busy_share(self, worker: Worker) -> float | None:
        """Return the share of time, 0 to 1, in which a worker computed."""
        before = self._same_worker(worker)
        return None if before is None else min(1.0, (worker.busy_seconds - before.busy_seconds) / self._elapsed_s)

    def token_rate(self, worker: Worker) -> float | None:
        """Return the tokens a second that a worker computed."""
        before = self._same_worker(worker)
        return None if before is None else (worker.num_tokens - before.num_tokens) / self._elapsed_s

    def quantile_s(self, histogram: str, share: float, model: str | None = None) -> float | None:
        """Return a quantile of the observations between the frames, linear inside a bucket as Prometheus has it."""
        latest = _counts(self.latest, histogram, model)
        if self._older is None or latest is None:
            return None
        before = _counts(self._older, histogram, model)
        counts = (
            [now - then for now, then in zip(latest.counts, before.counts, strict=True)] if before else latest.counts
        )
        goal = share * counts[-1] if counts else 0.0
        if goal <= 0:
            return None
        place = next(place for place, count in enumerate(counts) if count >= goal)
        low_s, seen = (latest.buckets[place - 1], counts[place - 1]) if place else (0.0, 0.0)
        return low_s + (latest.buckets[place] - low_s) * (goal - seen) / (counts[place] - seen)

    def _same_worker(self, worker: Worker) -> Worker | None:
        workers = self._older.workers if self._older is not None else ()
        return next(
            (one for one in workers if one.slot == worker.slot and one.restarts == worker.restarts), None
        )  # fmt: skip


def _counts(frame: Frame, name: str, model: str | None) -> Histogram | None:
    """Return a histogram of one model, or the sum over all models; None without observations."""
    family = frame.histograms.get(name, {})
    if model is not None:
        return family.get(model)
    found = list(family.values())
    if not found:
        return None
    return Histogram(found[0].buckets, [sum(counts) for counts in zip(*(one.counts for one in found), strict=True)])


def model_cells(frame: Frame, model: Model) -> list[str]:
    """Return name, state, device, memory, queue and outputs of a model of the frame."""
    state = "recovering" if model.recovering else "degraded" if model.degraded else model.state
    return [
        frame.shown_name(model), state, model.device or NONE, shown_bytes(model.memory_bytes), str(model.queue_depth),
        ", ".join(model.config.outputs) or NONE,
    ]  # fmt: skip


def problems(frame: Frame) -> Sequence[str]:
    """Return the server's problems in words, the most urgent first."""
    found = [] if frame.ready else [f"not ready: {frame.reason or 'it starts'}"]
    found += ["saturated: new requests are refused"] if frame.saturated else []
    refused = {
        "settings not reloaded": frame.config_error,
        "API keys not reloaded": frame.keys_error,
        "certificate not renewed": frame.tls_error,
    }
    found += [f"{what}: {error}" for what, error in refused.items() if error]
    found += [f"{gpu.device} is unhealthy" for gpu in frame.gpus if not gpu.healthy]
    failed = [model for model in frame.models if model.error and model.error not in frame.reason]
    return found + [f"{frame.shown_name(model)}: {model.error}" for model in failed]


def shown_bytes(count: float | None) -> str:
    """Return a number of bytes with its unit."""
    if not count:
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit in {"B", "KiB"} else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def shown_duration(seconds: float | None) -> str:
    """Return a time that a request took."""
    if seconds is None:
        return NONE
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def shown_rate(rate: float | None) -> str:
    """Return a rate with three digits."""
    if rate is None:
        return NONE
    for unit in ("", "k", "M"):
        if rate < 1000:
            return f"{rate:.0f}{unit}" if rate >= 100 or rate == 0 else f"{rate:.1f}{unit}"
        rate /= 1000
    return f"{rate:.1f}G"


def shown_uptime(seconds: int) -> str:
    """Return how long a server has run, in its two largest units."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count] or ["0 s"]
    return " ".join(shown[:2])
