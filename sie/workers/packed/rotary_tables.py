"""Tables of rotary factors for queries and keys by position, in float32, computed by the model's own rotary module.

A table is built once and grows. So rotary factors that depend on a whole sequence's length cannot use one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sie.workers.packed.formulas import UnknownPartsError
from sie.workers.packed.rotation import scalings_of

_LEAST_POSITIONS = 1024
_ANY_POSITION = 1 << 62


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


class Seen:
    """The inputs that a forward pass showed: of the first layer, and the rotary factors of each layer."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor] | None] = []
        """Each layer's cosines and sines."""
        self.calls: list[RotaryCall] = []
        self.first: Tensor | None = None
        """The first layer's input."""


@contextmanager
def watching(model: nn.Module, first: nn.Module, attentions: Sequence[nn.Module]) -> Iterator[Seen]:
    """Watch forward passes of a model, its first layer, and its layers' attention modules, in order."""
    seen = Seen()

    def note_layer(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_embeddings")
        seen.given.append(given if isinstance(given, tuple) else None)

    def note_first(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.first = args[0] if args else kwargs.get("hidden_states")

    def note_call(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.calls.append(RotaryCall(module, args, kwargs, output))

    hooks = [attention.register_forward_pre_hook(note_layer, with_kwargs=True) for attention in attentions]
    hooks.append(first.register_forward_pre_hook(note_first, with_kwargs=True))
    rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    hooks += [module.register_forward_hook(note_call, with_kwargs=True) for module in rotary]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def rotary_tables(seen: Seen, is_rotary: Sequence[bool], head_width: int) -> list[RotaryTable | None]:
    """Return each layer's table, None for a layer that is not rotary; layers that got one call's output share one.

    Raises UnknownPartsError for rotations that no table holds.
    """
    tables: dict[int, RotaryTable] = {}
    by_layer: list[RotaryTable | None] = []
    for is_own, given in zip(is_rotary, seen.given, strict=True):
        call = next((call for call in seen.calls if given is not None and call.output[0] is given[0]), None)
        if not is_own:
            by_layer.append(None)
            continue
        if call is None or not call.is_by_position:
            raise UnknownPartsError("an unsupported rotation")
        if id(call) not in tables:
            tables[id(call)] = RotaryTable(call)
        by_layer.append(tables[id(call)])
    widths = {table.cosines.shape[1] for table in tables.values()}
    if len(widths) > 1 or max(widths, default=0) > head_width:
        raise UnknownPartsError("rotations of unsupported widths")
    return by_layer


def point_to_tables(layers: Iterable[Any], tables: Sequence[RotaryTable | None], num_positions: int = 0) -> int:
    """Point each compiled layer to its table, extended to at least num_positions; return the positions that they hold.

    layers: records with `cosines` and `sines`. Without a rotary layer every position is valid.
    """
    own = {id(table): table for table in tables if table is not None}.values()
    for table in own:
        if num_positions > table.num_positions:
            table.reach(num_positions)
    for layer, table in zip(layers, tables, strict=True):
        if table is not None:
            layer.cosines, layer.sines = table.cosines.data_ptr(), table.sines.data_ptr()
    return min((table.num_positions for table in own), default=_ANY_POSITION)
