"""Puts a model's converted weights in their places, computed or mapped from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sie.workers.prepared import session
from sie.workers.prepared.session import MissingWeightsError

_SMALL_BYTES = 64 << 10
"""Buffers of up to this size are copied: rotary modules may write into theirs."""


def place_weights(model: nn.Module, convert: Callable[[str, Tensor], Tensor]) -> None:
    """Replace a model's parameters on the CPU by convert(name, parameter), tied ones once, and keep its buffers.

    The parameters and buffers of a skeleton come from the session's file. Raises MissingWeightsError if the file lacks
    one, or the model holds another tensor without values.
    """
    tables = _tables_of(model)
    placed: dict[int, Tensor] = {}
    names: list[str] = []
    for prefix, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                full = f"{prefix}.{name}"
                found = placed.get(id(weight))
                if found is None:
                    names.append(full)
                    found = session.tensor(full, _converted(convert, full, weight), is_table=id(weight) in tables)
                    placed[id(weight)] = found = _with_data(weight, found)
                    session.watch(found)
                module._parameters[name] = found  # type: ignore[assignment]  # a parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _place_buffer(f"{prefix}.{name}", buffer)
    if session.is_skeleton():
        _check_placed(model, names, session.recall("parameters"))
    session.remember("parameters", names)


def _place_buffer(name: str, buffer: Tensor) -> Tensor:
    kept = session.tensor(name, lambda: buffer)
    if kept.nbytes <= _SMALL_BYTES:
        return kept.clone() if session.is_skeleton() else buffer
    session.watch(buffer)
    return kept


def _converted(convert: Callable[[str, Tensor], Tensor], name: str, weight: Tensor) -> Callable[[], Tensor]:
    return lambda: convert(name, weight.data)


def _with_data(weight: nn.Parameter, data: Tensor) -> nn.Parameter:
    """Return the parameter with other data: itself, unless it is on the meta device, where torch does not allow that."""
    if weight.is_meta:
        return nn.Parameter(data, requires_grad=False)
    weight.data = data
    return weight


def _tables_of(model: Any) -> set[int]:
    """Return the identities of the weights of which a step reads a few rows: embeddings that are not the head, too."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    products = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return tables - products


def _check_placed(model: nn.Module, names: list[str], known: list[str] | None) -> None:
    """Raise MissingWeightsError for other parameters than the file's: a checkpoint may untie what its class ties.

    Also for a tensor without values, as a module's plain attribute may be.
    """
    if names != known:
        raise MissingWeightsError("the model ties other weights than the checkpoint")
    for prefix, module in model.named_modules():
        for name, value in (*module.__dict__.items(), *module._parameters.items(), *module._buffers.items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise MissingWeightsError(f"{prefix}.{name} is not in the file")
