"""Reads an adapter's weights. Every tensor must belong to a layer of the model and fit it, or all are refused.

Source: the file format of peft 0.21 (`base_model.model.NAME.lora_A.weight` and `lora_B`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sie.catalog.lora import LoraConfig, find_lora_weights, read_lora_config, refuse_adapter
from sie.values.card import AdapterSpec
from sie.values.errors import BadRequest

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_MAX_NAMED = 5
UNREAD = "pooler."
"""The name prefix of layers that the library runs but whose output is not used here."""


def read_lora(
    spec: AdapterSpec, shapes: Mapping[str, tuple[int, int]], prefix: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (A (r, inputs), scale * B (outputs, r)) in float32 on the CPU, by layer name.

    shapes holds (inputs, outputs) of each linear layer of the model. If an adapter was trained with a head around the
    model, prefix precedes these names. Raises Internal with the reason for files that are damaged or do not fit,
    BadRequest for a model with none of the adapter's layers.
    """
    config = read_lora_config(spec.id, spec.directory or "")
    tensors = _read_tensors(spec)
    names = {name for name, _ in tensors}
    before = "" if any(name in shapes for name in names) else f"{prefix}."
    layers = {name.removeprefix(before): name for name in names if name.startswith(before)}
    if not shapes.keys() & layers.keys():
        raise BadRequest(
            f"Model '{spec.model}' cannot run adapter '{spec.id}': it has none of its layers ({_some(names)})"
        )
    foreign = names - {name for layer, name in layers.items() if layer in shapes}
    if foreign:
        raise refuse_adapter(spec.id, f"the model does not have the layers {_some(foreign)}")
    _check_complete(spec, config, shapes, layers, before)
    return {
        layer: _checked(spec, config, name, tensors, shapes[layer])
        for layer, name in layers.items()
        if not layer.startswith(UNREAD)
    }


def _read_tensors(spec: AdapterSpec) -> dict[tuple[str, str], Tensor]:
    """Return the file's tensors by layer name and `A` or `B`."""
    path = find_lora_weights(spec.id, spec.directory or "")
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise refuse_adapter(spec.id, f"its safetensors file is damaged: {error}") from error
    tensors: dict[tuple[str, str], Tensor] = {}
    for key, tensor in stored.items():
        parts = _KEY.fullmatch(key)
        if parts is None:
            raise refuse_adapter(spec.id, f"tensor {key!r} is no update of a linear layer")
        tensors[parts[1], parts[2]] = tensor
    if not tensors:
        raise refuse_adapter(spec.id, "its safetensors file is empty")
    return tensors


def _check_complete(
    spec: AdapterSpec, config: LoraConfig, shapes: Iterable[str], layers: Mapping[str, str], before: str
) -> None:
    """Refuse a file without a layer that its config names: the vectors would be different with it."""
    if config.targets_all:
        return
    wanted = {layer for layer in shapes if config.targets(before + layer) and not layer.startswith(UNREAD)}
    if missing := wanted - layers.keys():
        raise refuse_adapter(spec.id, f"weights of {_some(missing)} are missing")


def _checked(
    spec: AdapterSpec, config: LoraConfig, name: str, tensors: Mapping[tuple[str, str], Tensor], shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return a layer's pair, B with the scale. name is the one in the file."""
    down, up = tensors.get((name, "A")), tensors.get((name, "B"))
    if down is None or up is None:
        raise refuse_adapter(spec.id, f"{name}.lora_{'A' if down is None else 'B'}.weight is missing")
    inputs, outputs = shape
    rank = config.rank(name)
    for letter, tensor, expected in (("A", down, (rank, inputs)), ("B", up, (outputs, rank))):
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            got = f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            raise refuse_adapter(spec.id, f"{name}.lora_{letter}.weight is {got}, not {expected} of floats")
        if not torch.isfinite(tensor).all():
            raise refuse_adapter(spec.id, f"{name}.lora_{letter}.weight holds values that are not finite")
    return down.float(), up.float() * config.scale(name)


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_MAX_NAMED]) + (", ..." if len(ordered) > _MAX_NAMED else "")
