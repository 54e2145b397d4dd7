"""Tables of rotary factors for queries and keys by position, in float32, computed by the model's own rotary module.

A table is built once and grows. So rotary factors that depend on a whole sequence's length cannot use one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sie.workers.packed.rotation import scalings_of

_LEAST_POSITIONS = 1024


class RotaryCall:
    """A recorded call of a rotary module in a forward pass, repeatable for other positions."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]
    ) -> None:
        self.module = module
        self.output = output
        self._args = args
        self._kwargs = kwargs

    @property
    def is_by_position(self) -> bool:
        """Whether a position has the same factors in every step."""
        return not scalings_of(self.module)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (1, t, width), float32, at positions (1, t)."""

        def exchange(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.new_zeros(1, 1, 1, dtype=torch.float32) if value.is_floating_point() else positions

        args = [exchange(value) for value in self._args]
        return self.module(*args, **{name: exchange(value) for name, value in self._kwargs.items()})


class RotaryTable:
    """Cosines and sines (positions, width) of one kind of layer."""

    def __init__(self, call: RotaryCall) -> None:
        self._call = call
        self.cosines = self.sines = torch.empty(0, 0)
        self.reach(_LEAST_POSITIONS)

    @property
    def num_positions(self) -> int:
        """Number of positions in the table."""
        return len(self.cosines)

    def reach(self, num_positions: int) -> None:
        """Extend the table to at least num_positions. The old tensors and their addresses become invalid."""
        length = 1 << (num_positions - 1).bit_length()
        with torch.inference_mode():
            cosines, sines = self._call.at(torch.arange(length)[None])
        self.cosines, self.sines = cosines[0].float().contiguous(), sines[0].float().contiguous()
