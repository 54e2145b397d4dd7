"""Dequantises weights while a model is read: each one by itself, from mapped files to the runner's format and device.

A weight (outputs, inputs) is (number - zero point) * scale, where a block of outputs and inputs shares the latter two.
It is computed in float32, a few rows at a time, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from sie.catalog.files import open_checkpoint, refuse
from sie.catalog.quantised import Quantisation
from sie.catalog.quantised_weights import QuantisedWeight
from sie.catalog.weights import plan_quantised, weight_files
from sie.runtime.logs import get_logger
from sie.values.card import ModelCard

_log = get_logger(__name__)
_PIECE: Final = 1 << 19
"""Values that are dequantised at once, so that their temporary tensors stay in a core's cache."""
_ROWS: Final = 8
"""Pieces begin at a multiple of this, because a word of AWQ has the numbers of eight outputs."""
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of eight outputs in a word. Source: AutoAWQ's awq/utils/packing_utils.py."""
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits of MXFP4. Source: OCP Microscaling Formats 1.0, section 5.3.3."""
_THREADS: Final = 4
"""Weights that transformers reads at a time."""
_PIECE_BYTES: Final = 32 * _PIECE
"""Upper bound of the temporary tensors of a piece."""


class LazyTensor:
    """A tensor of a checkpoint that is read, and perhaps dequantised, when transformers indexes it."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[], Tensor]) -> None:
        self.shape = shape
        self._read = read

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]


def open_dequantised(card: ModelCard, dtype: torch.dtype, device: torch.device) -> dict[str, LazyTensor] | None:
    """Return all tensors of a checkpoint with quantised weights, by their plain names; None for plain weights.

    Quantised weights are read in dtype on device, others as they are stored. Raises ModelLoadFailed for tensors that
    do not fit the method, and the errors of `safe_open`.
    """
    checkpoint = open_checkpoint(card.id, card.directory)
    planned = plan_quantised(checkpoint)
    if planned is None:
        return None
    found, weights = planned
    readers = {name: read for path in weight_files(checkpoint) for name, read in _readers(safe_open(path, "pt"))}
    layers = [_Layer(card.id, found, weight, readers) for weight in weights]
    for weight, layer in zip(weights, layers, strict=True):
        for part in weight.parts.values():
            readers.pop(part, None)  # a scale may belong to several weights
        readers[weight.name] = LazyTensor(layer.shape, partial(layer.dequantise, dtype, device))
    sizes = sorted(prod(layer.shape) * dtype.itemsize for layer in layers)
    _log.info(
        "%s: %d weights are dequantised from %s to %s: %d MiB, and at most %d MiB more while they are read",
        card.id, len(layers), found.name, str(dtype).removeprefix("torch."), sum(sizes) >> 20,
        sum(sizes[-_THREADS:]) + _THREADS * _PIECE_BYTES >> 20,
    )  # fmt: skip
    return readers


def _readers(file: Any) -> Iterator[tuple[str, LazyTensor]]:
    for name in file.keys():  # noqa: SIM118 -- not a mapping
        yield name, LazyTensor(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name))


class _Layer:
    """One quantised weight."""

    def __init__(
        self, model_id: str, found: Quantisation, weight: QuantisedWeight, tensors: dict[str, LazyTensor]
    ) -> None:
        """Read the indices among the weight's tensors. Raises ModelLoadFailed for an index outside of its range."""
        self._found = found
        self._parts = {role: tensors[name] for role, name in weight.parts.items()}
        self._block = weight.block
        self.shape = weight.shape
        if "shape" in self._parts:
            self.shape = self._stored_shape(model_id, weight)
        if "groups" in self._parts:
            groups = self._parts["groups"][...]
            is_unset = found.layout == "packed" and bool((groups == -1).any())  # by compressed-tensors
            in_order = torch.arange(self.shape[1], dtype=groups.dtype) // self._block[1]
            if is_unset or torch.equal(groups, in_order):
                del self._parts["groups"]
            elif len(groups) != self.shape[1] or not bool(((groups >= 0) & (groups < weight.num_groups)).all()):
                name, last = weight.parts["groups"], weight.num_groups - 1
                raise refuse(model_id, f"its tensor {name!r} must have a number from 0 to {last} for each input")

    def _stored_shape(self, model_id: str, weight: QuantisedWeight) -> tuple[int, ...]:
        rows, most = weight.shape
        given = self._parts["shape"][...].tolist()
        fits = given[0] == rows and most - 32 // self._found.bits < given[1] <= most
        if not fits or -(-given[1] // self._block[1]) != weight.num_groups:
            name, numbers = weight.parts["shape"], weight.parts["numbers"]
            raise refuse(model_id, f"its tensor {name!r} has the values {given}, which do not fit {numbers!r}")
        return rows, given[1]

    def dequantise(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the weight (outputs, inputs), or those of experts (experts, inputs, outputs)."""
        if self._found.layout == "mxfp4":
            return self._dequantise_experts(dtype, device)
        rows, columns = self.shape
        parts = {role: tensor[...].to(device) for role, tensor in self._parts.items() if role != "shape"}
        scales = self._grid(parts["scales"].float(), is_column=self._found.layout in ("awq", "gptq"))
        zeros = self._zeros(parts["zeros"]) if "zeros" in parts else None
        groups = parts.get("groups")
        weight = torch.empty(self.shape, dtype=dtype, device=device)
        step = max(_ROWS, _PIECE // columns // _ROWS * _ROWS)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            piece = self._numbers(parts["numbers"], first, last)
            if zeros is not None:
                piece -= self._spread(zeros, first, last, groups)
            weight[first:last] = piece.mul_(self._spread(scales, first, last, groups))
        return weight

    def _dequantise_experts(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        numbers, scales = (self._parts[role][...].to(device) for role in ("numbers", "scales"))
        values = torch.tensor(_FP4, device=device)
        weight = torch.empty(self.shape, dtype=dtype, device=device)
        step = max(1, _PIECE // self.shape[1])
        for expert in range(len(weight)):
            for first in range(0, self.shape[2], step):
                pairs = numbers[expert, first : first + step]
                piece = values[torch.stack((pairs & 15, pairs >> 4), -1).flatten(2).int()]
                piece *= scales[expert, first : first + step, :, None].view(torch.float8_e8m0fnu).float()
                weight[expert, :, first : first + step] = piece.flatten(1).T
        return weight

    def _numbers(self, stored: Tensor, first: int, last: int) -> Tensor:
        """Return rows of the stored numbers (last - first, inputs) as float32."""
        found, bits = self._found, self._found.bits
        if found.layout == "scaled":
            return stored[first:last].float()
        if found.layout == "packed":
            return (_unpack(stored[first:last], bits)[:, : self.shape[1]] - (1 << bits - 1)).float()
        if found.layout == "gptq":
            return _unpack(stored[:, first:last].T.contiguous(), bits).float()
        return _unpack_awq(stored[:, first // _ROWS : -(-last // _ROWS)]).float()

    def _zeros(self, stored: Tensor) -> Tensor:
        """Return the zero points as a grid, as `_grid` does."""
        found = self._found
        if found.layout == "awq":
            return _unpack_awq(stored).float()
        if found.layout == "gptq":
            return self._grid((_unpack(stored, found.bits) + found.zero_shift).float(), is_column=True)
        if found.layout == "packed" and stored.dtype == torch.int32:
            rows = -(-self.shape[0] // self._block[0])
            return (_unpack(stored.T, found.bits).T[:rows] - (1 << found.bits - 1)).float()
        return self._grid(stored.float(), is_column=False)

    def _grid(self, values: Tensor, *, is_column: bool) -> Tensor:
        """Return values as (blocks of outputs, groups of inputs); is_column: they are stored the other way round."""
        if is_column:
            return values.T
        return values if values.ndim == 2 else values.view(-1, 1)

    def _spread(self, grid: Tensor, first: int, last: int, groups: Tensor | None) -> Tensor:
        """Return the value of a grid for each row and column (last - first, inputs), or a form that broadcasts to it."""
        if self._block[0] == 1:
            grid = grid[first:last]
        else:
            grid = grid[torch.arange(first, last, device=grid.device) // self._block[0]]
        if groups is not None:
            return grid[:, groups.long()]
        if grid.shape[1] == 1:
            return grid
        return grid.repeat_interleave(self._block[1], 1)[:, : self.shape[1]]


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of bits in words (n, m) of 32 bits, lowest first, as (n, m * 32 / bits) int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).flatten(1)


def _unpack_awq(words: Tensor) -> Tensor:
    """Return the numbers of four bits in AWQ's words (n, m), which are eight outputs each, as (8 m, n) int32."""
    shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32, device=words.device)
    return ((words.T.contiguous()[:, None] >> shifts[:, None]) & 15).flatten(0, 1)
