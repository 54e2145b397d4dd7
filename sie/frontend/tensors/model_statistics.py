"""Collects the statistics of a model for the tensor APIs from the counter pages, by version and by batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from sie.frontend.telemetry.metrics import Merged, Pages, merge
from sie.frontend.tensors.states import ModelStatistics, RequestStatistics, Spent
from sie.ipc.messages import ModelEntry
from sie.metrics import definitions
from sie.metrics.family import Family
from sie.metrics.tensor_definitions import (
    COMPUTE_PHASES,
    OTHER_ROWS,
    TENSOR_FAMILIES,
    TENSOR_REQUEST_TIME,
    TENSOR_REQUESTS,
    TENSOR_STEP_TIME,
    TENSOR_STEPS,
)

T = TypeVar("T")

_ENDPOINT = "infer"
_PHASE_FIELDS = tuple(f"{phase}_ns" for phase in COMPUTE_PHASES)
_USED = (definitions.REQUESTS, definitions.REQUEST_DURATION, definitions.BATCH_SIZE, definitions.LAST_INFERENCE)


def read_statistics(pages: Pages, entries: Sequence[ModelEntry]) -> dict[tuple[str, str], ModelStatistics]:
    """Return each version's statistics since the server started, by (name, version)."""
    merged = merge(pages, (*_USED, *TENSOR_FAMILIES))
    return {(rule.name, rule.version): _statistics(merged, entry) for entry in entries if (rule := entry.card.tensor)}


def _statistics(merged: Merged, entry: ModelEntry) -> ModelStatistics:
    model = entry.card.id

    def value(family: Family, *labels: str) -> float:
        return merged[family.name].get(family.label_pairs(model, *labels), [0.0])[0]

    def count(*outcomes: str) -> int:
        return int(sum(value(definitions.REQUESTS, _ENDPOINT, outcome) for outcome in outcomes))

    def total_ns(phase: str) -> int:
        return int(value(definitions.REQUEST_DURATION, _ENDPOINT, phase) * 1e9)

    batches = merged[definitions.BATCH_SIZE.name].get(definitions.BATCH_SIZE.label_pairs(model), [0.0])
    requests = {rows: _requests_of(rows, value) for rows in _labels_of(merged, TENSOR_REQUESTS, model)}
    input_ns, infer_ns, output_ns = (sum(getattr(each, it) for each in requests.values()) for it in _PHASE_FIELDS)
    return ModelStatistics(
        num_succeeded=count("success"), num_failed=count("error", "queue_full", "cancelled"), success_ns=total_ns("total"),
        failure_ns=total_ns("failed"), queue_ns=total_ns("queue"), input_ns=input_ns,
        infer_ns=infer_ns if requests else total_ns("inference"), output_ns=output_ns,
        steps=_by_size({rows: _steps_of(rows, value) for rows in _labels_of(merged, TENSOR_STEPS, model)}),
        requests=_by_size(requests), num_rows=int(batches[0]),
        num_steps=int(sum(batches[1:])), last_used_ms=int(value(definitions.LAST_INFERENCE) * 1e3),
        memory_bytes=entry.memory_bytes, device=entry.device,
    )  # fmt: skip


def _labels_of(merged: Merged, family: Family, model: str) -> list[str]:
    """Return the sizes that this family has for a model, each once."""
    found = (dict(labels) for labels in merged[family.name])
    return [*dict.fromkeys(labels["rows"] for labels in found if labels["model"] == model)]


def _by_size(found: Mapping[str, T]) -> dict[int, T]:
    return {int(rows): found[rows] for rows in sorted(found.keys() - {OTHER_ROWS}, key=int)}


_Value = Callable[..., float]
"""Returns the value of a family with the labels after the model."""


def _steps_of(rows: str, value: _Value) -> Spent:
    phases = (int(value(TENSOR_STEP_TIME, rows, phase) * 1e9) for phase in COMPUTE_PHASES)
    return Spent(count=int(value(TENSOR_STEPS, rows)), **dict(zip(_PHASE_FIELDS, phases, strict=True)))


def _requests_of(rows: str, value: _Value) -> RequestStatistics:
    def spent(phase: str) -> int:
        return int(value(TENSOR_REQUEST_TIME, rows, phase) * 1e9)

    return RequestStatistics(
        count=int(value(TENSOR_REQUESTS, rows, "success")), num_failed=int(value(TENSOR_REQUESTS, rows, "failed")),
        success_ns=spent("success"), failed_ns=spent("failed"), queue_ns=spent("queue"),
        **dict(zip(_PHASE_FIELDS, map(spent, COMPUTE_PHASES), strict=True)),
    )  # fmt: skip
