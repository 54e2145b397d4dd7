"""Joins linear layers that read the same input into one layer, whose output they share.

Examples are queries, keys and values, or the two halves of a gated layer. No family is known by name: a forward pass
shows which layers get the same tensor. Fewer, larger products read their weights faster, and fewer calls mean less idle
time of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sie.runtime.logs import get_logger
from sie.workers.prepared import session
from sie.workers.prepared.session import MissingWeightsError

_log = get_logger(__name__)
_MAX_DIFFERENCE = 1e-4
"""Largest difference of two results, relative to the largest value."""


class SharedLinear(nn.Module):
    """Several layers in one, with concatenated outputs. It caches the outputs until each layer has read its own."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        """Take layers with the same input, which compute the outputs one by one until `join`."""
        super().__init__()
        self.layer: nn.Module = _OneByOne(layers)
        # Input, outputs, and layers still to read. In a list, since setting a module's attribute takes microseconds.
        self._last: list[Any] = [None, None, 0]
        self._num_layers = len(layers)

    def join(self) -> None:
        """Compute all outputs with one product. The layers' weights become views of the common weight."""
        if not isinstance(self.layer, _OneByOne):
            return
        layers = self.layer.layers
        weights = _cat([layer.weight.data for layer in layers])
        has_bias = layers[0].bias is not None
        joined = nn.Linear(weights.shape[1], weights.shape[0], bias=has_bias, device="meta")
        joined.weight = nn.Parameter(weights, requires_grad=False)
        if has_bias:
            joined.bias = nn.Parameter(_cat([layer.bias.data for layer in layers]), requires_grad=False)
        first = 0
        for layer in layers:
            layer.weight.data = weights[first : first + layer.out_features]
            first += layer.out_features
        self.layer = joined

    def forward(self, states: Tensor) -> Tensor:
        """Return all outputs; compute them once for each tensor, compared by identity."""
        last = self._last
        if last[0] is not states:
            last[:] = states, self.layer(states), self._num_layers
        output: Tensor = last[1]
        last[2] -= 1
        if not last[2]:  # outputs of a long prompt would hold gigabytes of GPU memory
            last[:] = None, None, 0
        return output

    __call__ = forward  # no hooks, which take longer than some layers


class _OneByOne(nn.Module):
    """Layers that compute their outputs one by one, as the joined layer will at once."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = layers
        self.in_features, self.out_features = layers[0].in_features, sum(layer.out_features for layer in layers)

    def forward(self, states: Tensor) -> Tensor:
        return torch.cat([layer(states) for layer in self.layers], -1)


class Share(nn.Module):
    """Replaces one original layer of a `SharedLinear`. Only the first one has it as a submodule."""

    def __init__(self, shared: SharedLinear, first: int, last: int, *, owns: bool) -> None:
        super().__init__()
        if owns:
            self.shared = shared
        self._holder = (shared,)
        self._first, self._last = first, last
        layer: Any = shared.layer
        self.in_features, self.out_features = int(layer.in_features), last - first

    @property
    def source(self) -> SharedLinear:
        """The joined layer that it is a part of."""
        return self._holder[0]

    @property
    def outputs(self) -> slice:
        """Its outputs within the joined layer."""
        return slice(self._first, self._last)

    def forward(self, states: Tensor) -> Tensor:
        """Return this layer's outputs, a view."""
        return self._holder[0](states)[..., self._first : self._last]

    __call__ = forward  # as above


def common_layer(parts: Sequence[Any]) -> nn.Module | None:
    """Return the layer whose outputs are exactly these modules' outputs, in order, or None for other modules."""
    shares = [part for part in parts if isinstance(part, Share)]
    if not shares or len(shares) != len(parts):
        return None
    shared = shares[0].source
    ends = [0, *(share.outputs.stop for share in shares)]
    is_whole = all(share.outputs.start == end for share, end in zip(shares, ends[:-1], strict=True))
    is_one = all(share.source is shared for share in shares) and ends[-1] == getattr(shared.layer, "out_features", None)
    return shared.layer if is_whole and is_one else None


def _cat(parts: list[Tensor]) -> Tensor:
    """Join tensors by their first dimension. On the meta device torch would import sympy for that."""
    first = parts[0]
    if not first.is_meta:
        return torch.cat(parts)
    return first.new_empty((sum(len(part) for part in parts), *first.shape[1:]))


def share_inputs(model: Any, sample: Tensor, *, joins: bool = True) -> int:
    """Join a model's layers in place; return how many were joined. sample is token ids (1, t).

    Without joins the caller calls `SharedLinear.join`: one at a time, joined weights that are packed afterwards need
    little memory.

    If the joined model fails or its results differ, all original layers are restored. Raises what the model raises
    before that.
    """
    count = _share(model, sample)
    if joins:
        for module in model.modules():
            if isinstance(module, SharedLinear):
                module.join()
    return count


def _share(model: Any, sample: Tensor) -> int:
    known = session.recall("shared_inputs")
    if known is not None:
        for parent, names in known:
            _replace(model.get_submodule(parent), names)
        return sum(len(names) for _, names in known)
    if session.is_skeleton():  # no forward pass shows what it computes
        raise MissingWeightsError("shared inputs are not in the file")
    with torch.no_grad():  # not inference_mode: the new parameters remain in the model
        with _watching(model) as calls:
            expected = _run(model, sample)
        groups = _groups(model, calls)
        names_of = {module: name for name, module in model.named_modules()}
        named = [(names_of[parent], names) for parent, names in groups]
        originals = [(parent, name, getattr(parent, name)) for parent, names in groups for name in names]
        for parent, names in groups:
            _replace(parent, names)
        try:
            found = _run(model, sample)
            is_same = float((found - expected).abs().max()) <= _MAX_DIFFERENCE * float(expected.abs().max())
        except Exception as error:  # an unknown architecture may raise anything; it runs with its original layers
            _log.info("linear layers are not joined: %s: %s", type(error).__name__, error)
            is_same = False
    if not is_same:
        for parent, name, layer in originals:
            setattr(parent, name, layer)
    session.remember("shared_inputs", named if is_same else [])
    return len(originals) if is_same else 0


def _run(model: Any, sample: Tensor) -> Tensor:
    """Return a model's logits, or an encoder's hidden states."""
    results = model(input_ids=sample)
    return results.logits if hasattr(results, "logits") else results.last_hidden_state


@contextmanager
def _watching(model: nn.Module) -> Iterator[list[tuple[nn.Linear, Tensor]]]:
    """Record each linear layer's input tensor; holding the tensors keeps their identities distinct."""
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
    """Return, for each parent, the names of its layers that got the same tensor and agree on having a bias."""
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


def _replace(parent: nn.Module, names: list[str]) -> None:
    layers = [getattr(parent, name) for name in names]
    shared = SharedLinear(layers)
    first = 0
    for name, layer in zip(names, layers, strict=True):
        setattr(parent, name, Share(shared, first, first + layer.out_features, owns=not first))
        first += layer.out_features
