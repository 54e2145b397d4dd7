"""Divides a model's linear layers among the members of a group, by the plan that transformers has for its family.

A layer with the style `colwise` has a part of its outputs on each member, and one with `rowwise` a part of its inputs;
the members add the outputs of the latter. Everything else is the same on all members.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from torch import Tensor, nn
from torch.nn import functional

from sie.catalog.files import refuse
from sie.workers.sharded.group import Group

Style = Literal["colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"]
_STYLES: Final[tuple[Style, ...]] = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")
_SAME_ON_ALL: Final = ("replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise")
_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")


class Shards:
    """One member's parts of one model."""

    def __init__(self, model_id: str, group: Group) -> None:
        self.group = group
        self._model_id = model_id
        self._styles: dict[str, Style] = {}
        self._dims: dict[str, int] = {}
        """The dimension along which each divided parameter is cut, by its name."""

    def shrink(self, model: Any) -> None:
        """Give a model on the meta device parameters of this member's size.

        Raises ModelLoadFailed for a model whose plan cannot be followed, with the reason.
        """
        self._styles = self._plan(model)
        _check_heads(self._model_id, model, self._styles, self.group.size)
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        for name, style in self._styles.items():
            layer = model.get_submodule(name)
            if f"{name}.weight" in tied:  # `install` takes its part of the table of embeddings
                continue
            for own, dim in _cuts(style).items():
                parameter = getattr(layer, own)
                if parameter is not None:
                    self._dims[f"{name}.{own}"] = dim
                    setattr(layer, own, nn.Parameter(self._part(parameter, dim), requires_grad=False))

    def part(self, name: str, weight: Tensor) -> Tensor:
        """Return this member's part of a whole weight, by its name in the model; a weight of no divided layer as it is."""
        dim = self._dims.get(name)
        return weight if dim is None else self._part(weight, dim).contiguous()

    def install(self, model: Any) -> None:
        """Replace the divided layers of a loaded model whose members exchange tensors."""
        for name, style in self._styles.items():
            layer = model.get_submodule(name)
            parent, _, own = name.rpartition(".")
            if style == "colwise":
                layer.out_features = layer.weight.shape[0]
                continue
            if f"{name}.weight" not in self._dims:
                layer.weight = nn.Parameter(self._part(layer.weight, 0), requires_grad=False)
            divided = JoinedOutputs if style == "colwise_gather_output" else AddedOutputs
            splits = style == "rowwise_split_input"
            setattr(model.get_submodule(parent), own, divided(layer, self.group, splits=splits))

    def _part(self, weight: Tensor, dim: int) -> Tensor:
        size = weight.shape[dim] // self.group.size
        return weight.narrow(dim, self.group.rank * size, size)

    def _plan(self, model: Any) -> dict[str, Style]:
        """Return the style of each linear layer to divide. Raises ModelLoadFailed."""
        plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
        layers = dict(model.named_modules())
        named = {_NUMBER.sub(".*", name) for name in (*layers, *(name for name, _ in model.named_parameters()))}
        for name, style in plan.items():
            if name in named and style not in (*_STYLES, *_SAME_ON_ALL):
                raise self._refusal(f"transformers' plan divides {name} as {style!r}, which is not supported")
        styles: dict[str, Style] = {}
        for name, layer in layers.items():
            style = plan.get(_NUMBER.sub(".*", name))
            if style not in _STYLES:
                continue
            if type(layer) is not nn.Linear:
                raise self._refusal(f"its layer {name} is a {type(layer).__name__} and not linear")
            size = layer.in_features if style.startswith("rowwise") else layer.out_features
            if not size % self.group.size:
                styles[name] = style
            elif style != "colwise_gather_output":
                raise self._refusal(f"the {size} rows or columns of {name} cannot be divided by {self.group.size}")
        if not any(style.startswith("rowwise") for style in styles.values()):
            raise self._refusal(f"transformers has no plan to divide a {type(model).__name__}")
        return styles

    def _refusal(self, reason: str) -> Exception:
        return refuse(self._model_id, f"tensor_parallel: {reason}")


def _cuts(style: Style) -> dict[str, int]:
    """Return the dimension to cut of each parameter; the bias of added outputs is added once, by all members."""
    return {"weight": 1} if style.startswith("rowwise") else {"weight": 0, "bias": 0}


def _check_heads(model_id: str, model: Any, styles: Mapping[str, Style], size: int) -> None:
    """Refuse a model whose heads cannot be divided where members have some of them each."""
    if "colwise" not in {style for name, style in styles.items() if "attn" in name or "attention" in name}:
        return
    config = model.config.get_text_config()
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if heads is not None and (not isinstance(heads, int) or heads % size):
            raise refuse(model_id, f"tensor_parallel: its {field}, {heads}, cannot be divided by {size}")


class _Divided(nn.Module):
    """A linear layer, divided: each member has a part of it."""

    def __init__(self, layer: nn.Linear, group: Group, *, splits: bool) -> None:
        """splits: the input is whole, and each member takes its own part of it."""
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._group, self._splits = group, splits


class AddedOutputs(_Divided):
    """Has a part of the inputs on each member, which add their outputs. Its bias is whole."""

    def forward(self, states: Tensor) -> Tensor:
        """Return the whole outputs (..., outputs)."""
        if self._splits:
            states = states.chunk(self._group.size, -1)[self._group.rank]
        outputs = self._group.add(functional.linear(states, self.weight))
        return outputs if self.bias is None else outputs + self.bias


class JoinedOutputs(_Divided):
    """Has a part of the outputs on each member; all get all of them."""

    def forward(self, states: Tensor) -> Tensor:
        """Return the whole outputs (..., outputs)."""
        return self._group.join(functional.linear(states, self.weight, self.bias))
