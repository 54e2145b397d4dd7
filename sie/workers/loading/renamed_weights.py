"""Reads the weights of a checkpoint under the names that a model class of transformers gives them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from sie.catalog.files import open_checkpoint, refuse
from sie.catalog.weights import weight_files
from sie.values.card import ModelCard
from sie.workers.loading.dequantised import LazyTensor

_ORIGINAL: Final = ".original"
"""The end of a weight's name that has adapters beside it, as torch's parametrizations write it."""


def read_renamed_weights(
    card: ModelCard, quantised: Mapping[str, LazyTensor] | None = None
) -> dict[str, Tensor | LazyTensor]:
    """Return all weights of a card's directory. The card's `weight_names` map their names to the returned ones.

    quantised are the weights of a quantised checkpoint, by name. Most are dequantised when they are indexed, but a
    weight that is split or joined is dequantised here.

    `NAME[0]` is the first row of a weight, `NAME^T` its transpose, and `NAME|0` and `NAME|1` are joined to one weight.
    A single number becomes a row of one element.

    Raises ModelLoadFailed if a weight cannot be split evenly, or two have one name, and for adapters beside quantised
    weights.
    """
    rules = [(re.compile(pattern), replacements) for pattern, *replacements in card.weight_names]
    adapter = card.merged_adapter
    if quantised is not None and adapter is not None:
        raise refuse(card.id, "its section sets adapter, which is not added to quantised weights")
    renamed: dict[str, dict[int, Tensor | LazyTensor]] = {}
    paths = weight_files(open_checkpoint(card.id, card.directory)) if quantised is None else []
    read = [_read(path, rules, adapter) for path in paths]
    for name, names, weight in chain(_rename_quantised(quantised or {}, rules), *read):
        if len(names) > 1 and weight.shape[0] % len(names):
            raise refuse(
                card.id,
                f"its weight {name!r} of shape {tuple(weight.shape)} cannot be cut into {len(names)} equal parts",
            )
        parts = weight[...].chunk(len(names)) if len(names) > 1 else [weight]
        for new, part in zip(names, parts, strict=True):
            whole, _, place = new.partition("|")
            own = part[0] if whole.endswith("[0]") else part[...].T.contiguous() if whole.endswith("^T") else part
            places = renamed.setdefault(whole.removesuffix("[0]").removesuffix("^T"), {})
            if int(place or 0) in places:
                raise refuse(card.id, f"two of its weights would be {new!r}, one of them {name!r}")
            places[int(place or 0)] = own if own.shape else own[None]
    return {name: _joined(parts) for name, parts in renamed.items()}


def _joined(parts: dict[int, Tensor | LazyTensor]) -> Tensor | LazyTensor:
    return parts[0] if len(parts) == 1 and 0 in parts else torch.cat([parts[place][...] for place in sorted(parts)])


def _rename_quantised(
    tensors: Mapping[str, LazyTensor], rules: Sequence[tuple[re.Pattern[str], list[str]]]
) -> Iterator[tuple[str, list[str], LazyTensor]]:
    for name, tensor in tensors.items():
        if names := _rename(name, rules):
            yield name, names, tensor


def _read(
    path: Path, rules: Sequence[tuple[re.Pattern[str], list[str]]], adapter: tuple[int, float] | None
) -> Iterator[tuple[str, list[str], Tensor]]:
    """Yield each weight that is not left out, with its name and its new names."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 -- not a mapping
            if names := _rename(name, rules):
                weight: Tensor = file.get_tensor(name)
                is_merged = adapter is not None and name.endswith(_ORIGINAL)
                yield name, names, _merged(file, name, weight, *adapter) if is_merged else weight  # type: ignore[misc]  # not None


def _merged(file: Any, name: str, weight: Tensor, number: int, scale: float) -> Tensor:
    """Return a weight with the update of one of its adapters, in float32; a table's is A B, a layer's B A."""
    down, up = (file.get_tensor(f"{name.removesuffix(_ORIGINAL)}.0.lora_{part}")[number].float() for part in "AB")
    update = down @ up if "embeddings" in name else up @ down
    return weight.float() + scale * update.view_as(weight)


def _rename(name: str, rules: Sequence[tuple[re.Pattern[str], list[str]]]) -> list[str]:
    names = [name]
    for pattern, replacements in rules:
        if names and pattern.search(names[0]):
            names = [pattern.sub(replacement, old) for old in names for replacement in replacements]
    return names
