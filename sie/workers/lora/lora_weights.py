"""Reads an adapter's weights. Every tensor must belong to a layer of the model and fit it, or all are refused.

Source: the file format of peft 0.21 (`base_model.model.NAME.lora_A.weight` and `lora_B`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sie.catalog.lora import (
    LoraConfig,
    LoraRule,
    apply_config,
    find_lora_weights,
    read_lora_config,
    refuse_adapter,
)
from sie.runtime.helper import Helper, HelperFailed
from sie.values.card import AdapterSpec
from sie.values.errors import BadRequest

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_MAX_NAMED = 5
_MAX_NAME_CHARS = 100
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MATCH_TIMEOUT_S: Final = 5.0
_MAX_RULE_BYTES = 64
_MAX_PART = 2
"""An adapter of more weights than so many times the model's takes more memory than anybody meant to give it."""
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
    try:
        with safe_open(find_lora_weights(spec.id, spec.directory or ""), "pt") as file:
            return _read(spec, config, file, shapes, prefix)
    except (OSError, SafetensorError) as error:
        raise refuse_adapter(spec.id, f"its safetensors file is damaged: {error}") from error


def _read(
    spec: AdapterSpec, config: LoraConfig, file: Any, shapes: Mapping[str, tuple[int, int]], prefix: str
) -> dict[str, tuple[Tensor, Tensor]]:
    tensors = _find_tensors(spec, file)
    names = {name for name, _ in tensors}
    before = "" if any(name in shapes for name in names) else f"{prefix}."
    layers = {name.removeprefix(before): name for name in names if name.startswith(before)}
    if not shapes.keys() & layers.keys():
        raise BadRequest(
            f"Model '{spec.model}' cannot run adapter '{spec.id}': the model has none of the adapter's layers ({_some(names)})"
        )
    foreign = names - {name for layer, name in layers.items() if layer in shapes}
    if foreign:
        raise refuse_adapter(spec.id, f"the model does not have the layers {_some(foreign)}")
    rules = dict(zip(shapes, _rules_of(spec, config, [before + layer for layer in shapes]), strict=True))
    if not config.targets_all:  # the config names layers, so each of them must have weights
        wanted = {layer for layer, rule in rules.items() if rule.is_target and not layer.startswith(UNREAD)}
        if missing := wanted - layers.keys():
            raise refuse_adapter(spec.id, f"weights of {_some(missing)} are missing")
    read = {layer: name for layer, name in layers.items() if not layer.startswith(UNREAD)}
    for layer, name in read.items():
        _check_shapes(spec, name, tensors, rules[layer].rank, shapes[layer])
    num_weights = sum(rules[layer].rank * sum(shapes[layer]) for layer in read)
    most = _MAX_PART * sum(inputs * outputs for inputs, outputs in shapes.values())
    if num_weights > most:
        raise refuse_adapter(
            spec.id, f"its {num_weights} weights are over {_MAX_PART} times those of the model's layers"
        )
    return {
        layer: _read_pair(spec, name, (tensors[name, "A"], tensors[name, "B"]), rules[layer].scale)
        for layer, name in read.items()
    }


def _rules_of(spec: AdapterSpec, config: LoraConfig, modules: list[str]) -> list[LoraRule]:
    """Return each module's rule; patterns are matched in a confined process."""
    if config.is_plain:
        return apply_config(config, modules)

    async def ask() -> bytes:
        helper = Helper("sie.catalog.lora")
        try:
            return await helper.ask(
                msgspec.json.encode((config, modules)),
                timeout_s=_MATCH_TIMEOUT_S,
                max_reply_bytes=_MAX_RULE_BYTES * (len(modules) + 1),
            )
        finally:
            helper.close()

    try:
        return msgspec.json.decode(asyncio.run(ask()), type=list[LoraRule])
    except TimeoutError:
        raise refuse_adapter(spec.id, f"its patterns took over {_MATCH_TIMEOUT_S:g} s to match") from None
    except HelperFailed as error:
        raise refuse_adapter(spec.id, "its patterns could not be matched in the memory for it") from error


def _find_tensors(spec: AdapterSpec, file: Any) -> dict[tuple[str, str], Any]:
    """Return the file's tensors by layer name and `A` or `B`, without their values."""
    tensors: dict[tuple[str, str], Any] = {}
    for key in file.keys():  # noqa: SIM118  # no mapping
        parts = _KEY.fullmatch(key)
        if parts is None:
            raise refuse_adapter(spec.id, f"tensor {key[:_MAX_NAME_CHARS]!r} is no update of a linear layer")
        tensors[parts[1], parts[2]] = file.get_slice(key)
    if not tensors:
        raise refuse_adapter(spec.id, "its safetensors file is empty")
    return tensors


def _check_shapes(
    spec: AdapterSpec, name: str, tensors: Mapping[tuple[str, str], Any], rank: int, shape: tuple[int, int]
) -> None:
    """Refuse a layer's pair that does not fit, before any value is read."""
    inputs, outputs = shape
    for letter, expected in (("A", (rank, inputs)), ("B", (outputs, rank))):
        tensor = tensors.get((name, letter))
        if tensor is None:
            raise refuse_adapter(spec.id, f"{name}.lora_{letter}.weight is missing")
        found, datatype = tuple(tensor.get_shape()), str(tensor.get_dtype())
        if found != expected or datatype not in _FLOATS:
            got = f"{found} of {_FLOATS.get(datatype, datatype)}"
            raise refuse_adapter(spec.id, f"{name}.lora_{letter}.weight is {got}, not {expected} of floats")


def _read_pair(spec: AdapterSpec, name: str, pair: tuple[Any, Any], scale: float) -> tuple[Tensor, Tensor]:
    """Return a layer's pair, B with the scale."""
    down, up = (tensor[:].float() for tensor in pair)
    up = up * scale
    for letter, tensor in (("A", down), ("B", up)):
        if not torch.isfinite(tensor).all():
            raise refuse_adapter(spec.id, f"{name}.lora_{letter}.weight holds values that are not finite, or too large")
    return down, up


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(name[:_MAX_NAME_CHARS] for name in ordered[:_MAX_NAMED]) + (
        ", ..." if len(ordered) > _MAX_NAMED else ""
    )
