"""Finds the best classes of an output: the largest elements of each batch item, and their labels. Pure.

Source: Triton's classification extension; TensorRT Inference Server v1, InferResponseHeader.Output.Class.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sie.values.bytes_tensor import frame_elements
from sie.values.errors import BadRequest
from sie.values.tensor import DATATYPES, Tensor, TensorRule, TensorSpec

_UNRANKED: Final = frozenset({"BYTES", "BOOL", "FP16", "BF16"})


class RankedClass(NamedTuple):
    """One element of a flattened output: its position, its value (int or float), and the position's label, if any."""

    position: int
    value: Any
    label: str


def spec_of(output: Tensor, rule: TensorRule) -> TensorSpec:
    """Return the spec of an output in a model's rule. An output without one, from a stub, gives its own spec."""
    for spec in rule.outputs:
        if spec.name == output.name:
            return spec
    return TensorSpec(name=output.name, datatype=output.datatype, shape=output.shape)


def rank_classes(output: Tensor, spec: TensorSpec, num_classes: int, *, is_batched: bool) -> list[list[RankedClass]]:
    """Return the num_classes largest elements of each batch item, largest first; equal ones keep their order.

    An item with fewer elements returns all of them. Raises BadRequest for a datatype that cannot be ordered.
    """
    if output.datatype in _UNRANKED:
        raise BadRequest(
            f"class result not available for output '{output.name}' due to unsupported type '{output.datatype}'"
        )
    values = np.frombuffer(output.data, DATATYPES[output.datatype])
    num_rows = output.shape[0] if is_batched and output.shape else 1
    rows = values.reshape(num_rows, values.size // max(num_rows, 1))
    return [_best(row, num_classes, spec.labels) for row in rows]


def _best(row: NDArray[Any], num_classes: int, labels: tuple[str, ...]) -> list[RankedClass]:
    # Reversed twice, so that the stable sort keeps the order of equal elements.
    order = (len(row) - 1 - np.argsort(row[::-1], kind="stable"))[::-1][:num_classes]
    best = zip(order.tolist(), row[order].tolist(), strict=True)
    return [RankedClass(i, value, labels[i] if i < len(labels) else "") for i, value in best]


def as_class_tensor(output: Tensor, spec: TensorSpec, num_classes: int, *, is_batched: bool) -> Tensor:
    """Return an output as BYTES `value:index[:label]`, (batch, k) or (k,); floats have six decimals."""
    ranked = rank_classes(output, spec, num_classes, is_batched=is_batched)
    k = len(ranked[0]) if ranked else 0
    data = frame_elements([_text(found).encode() for row in ranked for found in row])
    return Tensor(output.name, "BYTES", (len(ranked), k) if is_batched else (k,), memoryview(data))


def _text(found: RankedClass) -> str:
    value = f"{found.value:f}" if isinstance(found.value, float) else str(found.value)
    return f"{value}:{found.position}:{found.label}" if found.label else f"{value}:{found.position}"
