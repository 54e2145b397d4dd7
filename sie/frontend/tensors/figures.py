"""Collects the statistics of a model for the tensor APIs from the figures of `/metrics`, by version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sie.frontend.telemetry.metrics import Merged, merge
from sie.frontend.tensors.states import Figures
from sie.ipc.messages import ModelEntry
from sie.metrics import definitions
from sie.shm.pages import CounterPage

_ENDPOINT = "infer"


def read_figures(pages: Iterable[CounterPage], entries: Sequence[ModelEntry]) -> dict[tuple[str, str], Figures]:
    """Return each version's statistics since the server started, by (name, version)."""
    merged = merge(pages)
    return {(rule.name, rule.version): _figures(merged, entry) for entry in entries if (rule := entry.card.tensor)}


def _figures(merged: Merged, entry: ModelEntry) -> Figures:
    model = entry.card.id
    requests, durations = merged[definitions.REQUESTS.name], merged[definitions.REQUEST_DURATION.name]

    def count(*outcomes: str) -> int:
        pairs = (definitions.REQUESTS.label_pairs(model, _ENDPOINT, outcome) for outcome in outcomes)
        return int(sum(requests.get(pair, [0.0])[0] for pair in pairs))

    def total_ns(phase: str) -> int:
        return int(durations.get(definitions.REQUEST_DURATION.label_pairs(model, _ENDPOINT, phase), [0.0])[0] * 1e9)

    steps = merged[definitions.BATCH_SIZE.name].get(definitions.BATCH_SIZE.label_pairs(model), [0.0])
    last_used = merged[definitions.LAST_INFERENCE.name].get(definitions.LAST_INFERENCE.label_pairs(model), [0.0])
    return Figures(
        num_succeeded=count("success"), num_failed=count("error", "queue_full", "cancelled"), success_ns=total_ns("total"),
        failure_ns=total_ns("failed"),
        queue_ns=total_ns("queue"), infer_ns=total_ns("inference"), num_rows=int(steps[0]),
        num_steps=int(sum(steps[1:])), last_used_ms=int(last_used[0] * 1e3), memory_bytes=entry.memory_bytes,
        device=entry.device,
    )  # fmt: skip
