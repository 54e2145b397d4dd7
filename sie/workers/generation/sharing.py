"""Joins linear layers that read the same input into one layer, whose output they share.

Queries, keys and values, or the two halves of a gated layer: no family is known by name. Which layers get one and the
same tensor is seen in a forward pass. Fewer, larger products read their weights faster, and each call less is time that
the device does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sie.runtime.logs import get_logger

_log = get_logger(__name__)
_MAX_DIFFERENCE = 1e-4
"""Of the logits, relative to the largest: sums of other lengths are rounded otherwise."""


class SharedLinear(nn.Module):
    """Layers in one: outputs one behind the other. It remembers them until each of the layers has had its own."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        """Take layers of equal inputs; their weights become views of the common one."""
        super().__init__()
        weights = torch.cat([layer.weight.data for layer in layers])
        has_bias = layers[0].bias is not None
        self.layer: nn.Module = nn.Linear(weights.shape[1], weights.shape[0], bias=has_bias, device="meta")
        self.layer.weight = nn.Parameter(weights, requires_grad=False)
        if has_bias:
            self.layer.bias = nn.Parameter(torch.cat([layer.bias.data for layer in layers]), requires_grad=False)
        first = 0
        for layer in layers:
            layer.weight.data = weights[first : first + layer.out_features]
            first += layer.out_features
        # In a list, since a module's own attributes take microseconds to set: input, outputs, how many layers want them.
        self._last: list[Any] = [None, None, 0]
        self._num_layers = len(layers)

    def forward(self, states: Tensor) -> Tensor:
        """Return all outputs; once for each tensor, told by its identity."""
        last = self._last
        if last[0] is not states:
            last[:] = states, self.layer(states), self._num_layers
        output: Tensor = last[1]
        last[2] -= 1
        if not last[2]:  # kept, those of a long prompt would take gigabytes of a GPU
            last[:] = None, None, 0
        return output

    __call__ = forward  # no hooks, which take longer than some layers


class Share(nn.Module):
    """One of the layers of a `SharedLinear`, in the place of the original. Only the first owns it, as modules do."""

    def __init__(self, shared: SharedLinear, first: int, last: int, *, owns: bool) -> None:
        super().__init__()
        if owns:
            self.shared = shared
        self._holder = (shared,)
        self._first, self._last = first, last
        self.in_features, self.out_features = shared.layer.in_features, last - first

    @property
    def source(self) -> SharedLinear:
        """The layers in one that it is a part of."""
        return self._holder[0]

    @property
    def outputs(self) -> slice:
        """Which outputs of the common layer are its own."""
        return slice(self._first, self._last)

    def forward(self, states: Tensor) -> Tensor:
        """Return this layer's outputs, a view."""
        return self._holder[0](states)[..., self._first : self._last]

    __call__ = forward  # as above


def common_layer(parts: Sequence[Any]) -> nn.Module | None:
    """Return the layer whose outputs these modules are, one behind the other and nothing besides; None for any others."""
    shares = [part for part in parts if isinstance(part, Share)]
    if not shares or len(shares) != len(parts):
        return None
    shared = shares[0].source
    ends = [0, *(share.outputs.stop for share in shares)]
    is_whole = all(share.outputs.start == end for share, end in zip(shares, ends[:-1], strict=True))
    is_one = all(share.source is shared for share in shares) and ends[-1] == getattr(shared.layer, "out_features", None)
    return shared.layer if is_whole and is_one else None


def share_inputs(model: Any, sample: Tensor) -> int:
    """Join a float32 model's layers, in place; return how many became others' parts. sample is token ids (1, t).

    Where the joined model fails or gives other logits, everything is put back.
    """
    with torch.no_grad():  # not inference_mode: what is made here stays
        with _watching(model) as calls:
            expected = model(input_ids=sample, use_cache=False).logits
        groups = _groups(model, calls)
        originals = [(parent, name, getattr(parent, name)) for parent, names in groups for name in names]
        for parent, names in groups:
            _join(parent, names)
        try:
            found = model(input_ids=sample, use_cache=False).logits
            is_same = float((found - expected).abs().max()) <= _MAX_DIFFERENCE * float(expected.abs().max())
        except Exception as error:  # whatever a foreign architecture raises, it runs as it was
            _log.info("layers stay apart: %s: %s", type(error).__name__, error)
            is_same = False
    if not is_same:
        for parent, name, layer in originals:
            setattr(parent, name, layer)
        return 0
    return len(originals)


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """Note which linear layer gets which tensor; holding the tensors keeps their identities apart."""
    calls: list[tuple[nn.Linear, Tensor]] = []

    def note(layer: Any, inputs: tuple[Tensor, ...]) -> None:
        calls.append((layer, inputs[0]))

    hooks = [layer.register_forward_pre_hook(note) for layer in model.modules() if type(layer) is nn.Linear]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _groups(model: nn.Module, calls: list[tuple[nn.Linear, Tensor]]) -> list[tuple[nn.Module, list[str]]]:
    """Return, for each parent, the names of its layers that got one tensor and are alike."""
    places = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
    tied = [id(weight) for _, weight in model.named_parameters(remove_duplicate=False)]
    by_input: dict[tuple[int, int, bool], list[str]] = {}
    parents: dict[tuple[int, int, bool], nn.Module] = {}
    seen: set[nn.Module] = set()
    for layer, states in calls:
        if layer in seen or tied.count(id(layer.weight)) > 1:
            continue
        seen.add(layer)
        parent, name = places[layer]
        key = (id(parent), id(states), layer.bias is not None)
        parents[key] = parent
        by_input.setdefault(key, []).append(name)
    return [(parents[key], names) for key, names in by_input.items() if len(names) > 1]


def _join(parent: nn.Module, names: list[str]) -> None:
    layers = [getattr(parent, name) for name in names]
    shared = SharedLinear(layers)
    first = 0
    for name, layer in zip(names, layers, strict=True):
        setattr(parent, name, Share(shared, first, first + layer.out_features, owns=not first))
        first += layer.out_features
