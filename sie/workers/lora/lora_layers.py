"""Applies LoRA adapters to their rows of a step, and swaps in the layers that do so.

y = W x + scale * B (A x) on the rows of the adapter's own sequences. So one packed step serves any mixture of adapters
and the model itself. Layers are replaced while a model has adapters. A step without adapters only costs a branch in
each of them. Source: arXiv 2106.09685, section 4.1.

Gathering each adapter's rows was the fastest simple way: 7 to 15 % over the bare layers of a 384-wide model at 1,024
tokens with three adapters in float32 on a processor. Stacked weights with a mask are no faster with few adapters and
slower with ten, and one sequence's overflow would reach the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sie.values.card import AdapterSpec
from sie.values.errors import Internal
from sie.workers.device.device import move
from sie.workers.lora.lora_weights import read_lora
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.packed.rounded_linear import RoundedLinear
from sie.workers.packed.sharing import Share

_NONE = -1
_PROBE_LENGTHS = (5, 3)


class LoraPair(NamedTuple):
    """One adapter's update of one layer: down (r, inputs) and up (outputs, r), the latter multiplied by the scale."""

    down: Tensor
    up: Tensor


class StepRows:
    """Maps the rows of the running forward pass to adapters. All layers of a model share one instance."""

    def __init__(self, device: torch.device) -> None:
        self.parts: list[tuple[str, Tensor | None]] = []
        """(adapter, its rows; None if it has all rows). Empty while no adapter is active."""
        self.num_rows = 0
        self._owners: NDArray[np.intp] | None = None
        self._names: list[str] = []
        self._device = device

    @contextmanager
    def step(self, loras: Sequence[str], batch: PackedBatch) -> Iterator[None]:
        """Within the block, run item i of the batch's step with the adapter loras[i], empty for none.

        An empty loras means a step without adapters.
        """
        if not loras:
            yield
            return
        self._names = sorted(set(loras) - {""})
        numbers = {name: number for number, name in enumerate(self._names)}
        own = np.array([numbers.get(name, _NONE) for name in loras], np.intp)
        self._owners = np.repeat(own[batch.order], np.diff(batch.cu_seqlens))
        try:
            self.narrow(0, len(self._owners))
            yield
        finally:
            self._owners, self.parts = None, []

    def narrow(self, start: int, end: int, kept: NDArray[np.bool_] | None = None) -> None:
        """Restrict the mapping to tokens start .. end of the step, which the model runs next.

        kept, of any shape, is False for the rows that are padding, which have no adapter; None for no padding.
        """
        if self._owners is None:
            return
        owners = self._owners[start:end]
        if kept is not None:
            owners = np.full(kept.size, _NONE, np.intp)
            owners[kept.ravel()] = self._owners[start:end]
        self.num_rows = len(owners)
        self.parts = []
        for number, name in enumerate(self._names):
            rows = np.flatnonzero(owners == number)
            if len(rows):
                everywhere = len(rows) == len(owners)
                self.parts.append((name, None if everywhere else move(torch.from_numpy(rows), self._device)))

    def fill(self, num_rows: int) -> None:
        """Add num_rows padding rows after the step's rows. An adapter of all rows changes them too."""
        self.num_rows += num_rows


class LoraLayer(nn.Module):
    """A linear layer with the updates of any number of adapters."""

    def __init__(self, base: nn.Module, rows: StepRows) -> None:
        super().__init__()
        self.base = base
        self.pairs: dict[str, LoraPair] = {}
        self._rows = rows

    def forward(self, x: Tensor) -> Tensor:
        """Return the base layer's output, with each adapter's update on its rows."""
        y: Tensor = self.base(x)
        if not self._rows.parts:
            return y
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if len(inputs) != self._rows.num_rows:
            raise Internal(f"a layer reads {len(inputs)} rows in a step of {self._rows.num_rows} tokens")
        for name, rows in self._rows.parts:
            pair = self.pairs.get(name)
            if pair is None:
                continue
            if rows is None:
                outputs.addmm_(inputs @ pair.down.t(), pair.up.t())
            else:
                outputs.index_add_(0, rows, (inputs.index_select(0, rows) @ pair.down.t()) @ pair.up.t())
        return y


class LoraAdapters:
    """The adapters of one loaded model. `read` may run on a thread beside the steps, everything else between steps."""

    def __init__(self, model: nn.Module, rows: StepRows, run: Callable[[PackedBatch], Tensor]) -> None:
        """Take a model; `run` takes a packed batch and returns its (t, d) hidden states."""
        self._model = model
        self._rows = rows
        self._run = run
        self._layers: dict[str, LoraLayer] = {}
        self._names: set[str] = set()
        self._linears = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D | RoundedLinear | Share)
        }

    def __bool__(self) -> bool:
        return bool(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def read(self, spec: AdapterSpec) -> dict[str, LoraPair]:
        """Return an adapter's weights by layer, checked against the model's.

        Raises Internal with the reason if they do not fit, BadRequest if the model has none of the layers.
        """
        prefix = str(getattr(self._model, "base_model_prefix", ""))
        updates = read_lora(spec, {name: _shape(layer) for name, layer in self._linears.items()}, prefix)
        pairs: dict[str, LoraPair] = {}
        for name, (down, up) in updates.items():
            layer = self._linears[name]
            # A rounded layer computes in the model's own format, and a joined one has no weight of its own.
            is_own = isinstance(layer, nn.Linear | Conv1D)
            weight = layer.weight if is_own else next(self._model.parameters())
            pairs[name] = pair = LoraPair(*(part.to(weight.device, weight.dtype) for part in (down, up)))
            if not all(torch.isfinite(part).all() for part in pair):
                raise Internal(f"Adapter '{spec.id}' cannot be loaded: {name} has values too large for {weight.dtype}")
        return pairs

    def install(self, name: str, pairs: dict[str, LoraPair]) -> int:
        """Make an adapter usable from the next step on; return the bytes of its weights.

        Raises Internal if a small trial step shows that the architecture cannot run with it.
        """
        self._names.add(name)
        for module, pair in pairs.items():
            layer = self._layers.get(module)
            if layer is None:
                layer = self._layers[module] = LoraLayer(self._linears[module], self._rows)
                self._model.set_submodule(module, layer)
            layer.pairs[name] = pair
        try:
            self._try_out(name)
        except Exception as error:  # a foreign architecture may raise anything; the model must keep running
            self.remove(name)
            raise Internal(f"Adapter '{name}' cannot be loaded: the model does not run with it: {error}") from error
        return sum(pair.down.nbytes + pair.up.nbytes for pair in pairs.values())

    def remove(self, name: str) -> None:
        """Free an adapter; layers without any adapter are restored."""
        self._names.discard(name)
        for module, layer in list(self._layers.items()):
            layer.pairs.pop(name, None)
            if not layer.pairs:
                self._model.set_submodule(module, layer.base)
                del self._layers[module]

    def _try_out(self, name: str) -> None:
        batch = pack_sequences([np.ones(length, np.int32) for length in _PROBE_LENGTHS])
        with torch.inference_mode(), self._rows.step([name, ""], batch):
            if not torch.isfinite(self._run(batch)).all():
                raise ValueError("its values are not finite")


def _shape(layer: nn.Linear | Conv1D | RoundedLinear | Share) -> tuple[int, int]:
    """Return (inputs, outputs); a Conv1D stores its weight transposed."""
    if not isinstance(layer, Conv1D):
        return layer.in_features, layer.out_features
    return layer.weight.shape[0], layer.weight.shape[1]
