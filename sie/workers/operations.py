"""Owns what differs between the operations of a step: the runner's method, the reply's rows and the words for it.

Pure but for the call of the runner.
"""

from __future__ import annotations

from typing import Any

from sie.errors import BadRequest
from sie.types import ModelCard, WorkHeader
from sie.workers.requests import Request
from sie.workers.runners import StepOutputs
from sie.workers.runners.quantise import output_layout
from sie.workers.scheduler import Waiting


def by_operation(items: list[Waiting]) -> list[list[Waiting]]:
    """Part a step's items where a model both encodes and scores: each operation is a forward pass of its own."""
    groups: dict[str, list[Waiting]] = {}
    for item in items:
        groups.setdefault(item.request.header.operation, []).append(item)
    return list(groups.values())


def is_score(items: list[Waiting]) -> bool:
    """Tell whether the items of one forward pass are pairs to score."""
    return items[0].request.header.operation == "score"


def words_of(items: list[Waiting]) -> str:
    """Return what an error calls that forward pass."""
    return "scoring" if is_score(items) else "encoding"


def row_layout(header: WorkHeader, card: ModelCard) -> tuple[str, int]:
    """Return dtype code and width of a request's rows; of a request without dense rows the width means nothing.

    Raises BadRequest as `output_layout` does, and for an output that the model does not have.
    """
    if header.operation == "score":
        return "<f4", 1
    if not set(header.output_types) <= set(card.outputs):
        raise BadRequest(f"Model '{card.id}' does not have all of the outputs {list(header.output_types)}")
    return output_layout(card.dims.get("dense", 1), header.truncate_dim, header.output_dtype)


def costs_of(request: Request, card: ModelCard) -> list[int]:
    """Return the tokens of each item as the runner will see them: it fills short queries up."""
    if card.late is None or not request.header.is_query:
        return request.costs
    return [max(cost, card.late.expand_to) for cost in request.costs]


def forward(runner: Any, items: list[Waiting]) -> StepOutputs:
    """Run one forward pass of one operation. runner is a `sie.workers.runners.Runner`."""
    inputs = [item.request.inputs[item.index] for item in items]
    if is_score(items):
        return StepOutputs(scores=runner.run_pairs(inputs))
    loras = _loras(items) if getattr(runner, "adapters", None) else ()
    if runner.takes == "tokens":
        return StepOutputs(runner.run_tokens(inputs, *loras))
    if runner.takes == "text":
        return StepOutputs(runner.run_texts(inputs, *loras))
    return runner.run_wants(inputs, [item.request.header for item in items], *loras)


def _loras(items: list[Waiting]) -> tuple[list[str], ...]:
    """Return the argument with each item's adapter, or none when no item has one."""
    loras = [item.request.header.lora for item in items]
    return (loras,) if any(loras) else ()
