"""Owns what differs between the operations of a step: the runner's method, the reply's rows and the words for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie.types import ModelCard, WorkHeader
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
    """Return dtype code and width of a request's rows. Raises BadRequest as `output_layout` does."""
    if header.operation == "score":
        return "<f4", 1
    return output_layout(card.dims["dense"], header.truncate_dim, header.output_dtype)


def forward(runner: Any, items: list[Waiting]) -> NDArray[np.float32]:
    """Run one forward pass of one operation; return a row for each item. runner is a `sie.workers.runners.Runner`."""
    inputs = [item.request.inputs[item.index] for item in items]
    if is_score(items):
        return runner.run_pairs(inputs)
    return runner.run_tokens(inputs) if runner.takes == "tokens" else runner.run_texts(inputs)
