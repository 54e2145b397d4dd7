"""Rotates each sequence of a row by the rotary factors of its own length, independent of its neighbours' lengths.

A rotary module of transformers with dynamic or longrope scaling uses the factors of the longest position in its input.
A dynamic one also keeps them for shorter sequences that come later. No formula is repeated here: the module itself is
called, once for each set of factors. Only the choice between longrope's two sets is made here, because transformers
before 5.23 waits for the device to make it.
Source: transformers 5.23 modeling_rope_utils.py, dynamic_rope_update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sie.workers.device.device import move

Factors = tuple[Tensor, Tensor]
"""Cosines and sines (1, t, width)."""
Ask = Callable[[Tensor, Tensor], Factors]
Lengths = NDArray[np.int64] | Tensor
"""For each token of a row (t,), the length of the sequence whose factors it gets. A tensor is for a CUDA graph."""


class Scaling(NamedTuple):
    """How factors depend on a length: equal up to `most` tokens; above, equal again, or each length has its own."""

    most: int
    is_each: bool

    def least_length(self, lengths: Any) -> Any:
        """Return the least length with the same factors as each given one; 0: the factors of the shortest sequences."""
        return np.where(lengths <= self.most, 0, lengths if self.is_each else self.most + 1)


def scalings_of(module: nn.Module) -> dict[str | None, Scaling]:
    """Return the scalings that depend on a length, by layer type (None: all layers); empty for any other module."""
    kinds: Any = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        kinds = {None: kinds}
    scalings: dict[str | None, Scaling] = {}
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ():
        owner: Any = module
        if kind == "longrope":
            parameters = owner.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            scalings[layer_type] = Scaling(int(parameters["original_max_position_embeddings"]), is_each=False)
        elif "dynamic" in kind:
            scalings[layer_type] = Scaling(int(owner.original_max_seq_len), is_each=True)
    return scalings


def find_rotations(model: nn.Module) -> Rotations | None:
    """Return the `Rotations` of a model, or None if its factors are fixed."""
    scalings = {module: found for module in model.modules() if (found := scalings_of(module))}
    return Rotations(scalings) if scalings else None


class Rotations:
    """The rotary modules of one model whose factors depend on a length. Used by one thread at a time."""

    def __init__(self, scalings: dict[nn.Module, dict[str | None, Scaling]]) -> None:
        """Replace the modules' forward passes."""
        self._scalings = scalings
        self._lengths: Lengths | None = None
        for module, found in scalings.items():
            longrope = {kind: one.most for kind, one in found.items() if not one.is_each}
            forward: Callable[..., Factors] = _Longrope(module, longrope) if longrope else module.forward
            module.forward = partial(self._rotate, module, forward)

    def least_length(self, length: int) -> int:
        """Return the least length with the same factors as a sequence of this length."""
        return max(int(one.least_length(length)) for found in self._scalings.values() for one in found.values())

    @contextmanager
    def row(self, lengths: Lengths) -> Iterator[None]:
        """Let forward passes of one row take each token's factors from these lengths.

        Outside this context, the sequences of a forward pass have one length.
        """
        self._lengths = lengths
        try:
            yield
        finally:
            self._lengths = None

    def _rotate(
        self, module: nn.Module, forward: Callable[..., Factors], x: Tensor, position_ids: Tensor,
        layer_type: str | None = None,
    ) -> Factors:  # fmt: skip
        ask: Ask = forward if layer_type is None else partial(forward, layer_type=layer_type)
        scaling = self._scalings[module].get(layer_type)
        lengths = self._lengths
        if scaling is None:
            return ask(x, position_ids)
        if lengths is not None and position_ids.shape != (1, len(lengths)):
            raise ValueError(f"positions of shape {tuple(position_ids.shape)} for a row of {len(lengths)} tokens")
        if isinstance(lengths, Tensor):
            return _rotate_in_graph(ask, x, position_ids, lengths, scaling)
        if scaling.is_each:  # position 0 makes a dynamic module forget the longest sequence that it has seen
            ask(x, torch.zeros_like(position_ids[..., :1]))
        if lengths is None:
            return ask(x, position_ids)
        return _rotate_parts(ask, x, position_ids, scaling.least_length(lengths))


class _Longrope:
    """The forward pass of a longrope module, with factors that the device itself chooses: the host waits for nothing."""

    def __init__(self, module: Any, most: dict[str | None, int]) -> None:
        """Compute both sets of frequencies of each layer type. most has the lengths of the longest short sequences."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        self._module = module
        self._own: Callable[..., Factors] = module.forward
        self._forward: Callable[..., Factors] = unwrap(type(module).forward)  # without the library's own choice
        self._sets: dict[str | None, tuple[str, int, Tensor, Tensor]] = {}
        for layer_type, length in most.items():
            prefix = "" if layer_type is None else f"{layer_type}_"
            device = getattr(module, f"{prefix}inv_freq").device
            long, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=length + 1, layer_type=layer_type)
            short = getattr(module, f"{prefix}original_inv_freq").to(device)
            self._sets[layer_type] = (f"{prefix}inv_freq", length, long, short)

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Factors:
        """Return the factors of positions (n, t), as the module does."""
        kind = {} if layer_type is None else {"layer_type": layer_type}
        if layer_type not in self._sets:
            return self._own(x, position_ids, **kind)
        name, most, long, short = self._sets[layer_type]
        setattr(self._module, name, torch.where(position_ids.max() >= most, long, short))
        return self._forward(self._module, x, position_ids, **kind)


def _rotate_parts(ask: Ask, x: Tensor, position_ids: Tensor, lengths: NDArray[np.int64]) -> Factors:
    """Return the factors of a row (1, t) whose tokens belong to sequences of lengths (t,)."""
    each: list[int] = np.unique(lengths).tolist()
    if len(each) == 1:
        return _ask_as(ask, x, position_ids, each[0])
    parts: list[Factors] = []
    for length in each:  # ascending, since a dynamic module only grows
        rows = move(torch.from_numpy(np.flatnonzero(lengths == length)), position_ids.device)
        parts.append(_ask_as(ask, x, position_ids[:, rows], length))
    order = move(torch.from_numpy(np.argsort(np.argsort(lengths, kind="stable"))), position_ids.device)
    cosines, sines = (torch.cat(tensors, 1)[:, order] for tensors in zip(*parts, strict=True))
    return cosines, sines


def _rotate_in_graph(ask: Ask, x: Tensor, position_ids: Tensor, lengths: Tensor, scaling: Scaling) -> Factors:
    """Return the same if only the device knows the lengths, as in a CUDA graph: both sets of factors are computed."""
    if scaling.is_each:
        raise ValueError("a length has its own rotary factors, so its steps cannot be recorded")
    short = ask(x, position_ids.clamp(max=scaling.most - 1))
    long = _ask_as(ask, x, position_ids, scaling.most + 1)
    is_long = (lengths > scaling.most)[None, :, None]
    cosines, sines = (torch.where(is_long, *both) for both in zip(long, short, strict=True))
    return cosines, sines


def _ask_as(ask: Ask, x: Tensor, position_ids: Tensor, length: int) -> Factors:
    """Return the factors of positions (1, t) in a sequence of this length. The module also gets its last position."""
    if not length:
        return ask(x, position_ids)
    last = position_ids.new_full((1, 1), length - 1)
    cosines, sines = ask(x, torch.cat((position_ids, last), 1))
    return cosines[:, :-1], sines[:, :-1]
