"""Recognises a decoder of the Llama kind by its parts, not by its name.

Embeddings, layers of attention and of two or three linear layers, each behind or between RMS norms, a norm and a head;
linear layers packed, those that read one input joined, norms compiled; and no parameter besides. What such parts do not
show (factors, caps) is taken from the configuration, and the comparison at load sees whether that was all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sie.native.encoder import ACTIVATIONS
from sie.workers.generation.norms import CompiledNorm
from sie.workers.generation.sharing import common_layer
from sie.workers.generation.weights import PackedLinear

_SAMPLE = torch.linspace(-6, 6, 97)
_FORMULAS = {"gelu": functional.gelu, "gelu_new": lambda x: functional.gelu(x, approximate="tanh"), "relu": functional.relu,
             "silu": functional.silu}  # fmt: skip
_ORDERS: dict[frozenset[str], tuple[str | None, str | None, str | None, str | None]] = {
    frozenset(name for name in order if name is not None): order
    for order in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    )
}
"""The norms that a layer has, as a set: before attention, behind it, before the block, behind it."""


class LayerParts(NamedTuple):
    """One layer. qkv gives queries, keys and values, up the gate and what it is multiplied with."""

    attention: nn.Module
    qkv: PackedLinear
    out: PackedLinear
    up: PackedLinear
    down: PackedLinear
    norms: tuple[CompiledNorm | None, CompiledNorm | None, CompiledNorm | None, CompiledNorm | None]
    """In the order of `_ORDERS`."""
    query_norm: CompiledNorm | None
    key_norm: CompiledNorm | None
    turns: bool
    """Whether positions turn its queries and keys."""

    @property
    def modules(self) -> Iterator[nn.Module]:
        """All that have parameters."""
        yield from (self.qkv, self.out, self.up, self.down)
        yield from (norm for norm in (*self.norms, self.query_norm, self.key_norm) if norm is not None)


class DecoderParts(NamedTuple):
    """A whole decoder. activation is a number of `sie.native.encoder.ACTIVATIONS`."""

    embeddings: nn.Embedding
    first: nn.Module
    """The first layer as the library has it."""
    layers: list[LayerParts]
    norm: CompiledNorm
    head: PackedLinear
    activation: int
    is_gated: bool
    residual_scale: float
    logit_scale: float
    logit_cap: float


class UnknownPartsError(Exception):
    """A model is no decoder of this kind; the text says in what."""


def find_parts(model: Any) -> DecoderParts:
    """Return a model's parts. Raises UnknownPartsError unless they are all there and hold every parameter that it has."""
    body, config = model.base_model, model.config.get_text_config()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = list(getattr(body, "layers", ()))
    norm = getattr(body, "norm", None)
    if not (modules and isinstance(embeddings, nn.Embedding) and isinstance(head, PackedLinear)):
        raise UnknownPartsError("embeddings, layers or head of another kind")
    if not isinstance(norm, CompiledNorm):
        raise UnknownPartsError("a norm of another kind")
    layers = [_layer(module) for module in modules]
    blocks = [module.mlp for module in modules]
    parts = DecoderParts(
        embeddings,
        modules[0],
        layers,
        norm,
        head,
        _activation(blocks),
        _is_gated(layers),
        float(getattr(config, "residual_multiplier", None) or 1.0),
        1.0 / float(getattr(config, "logits_scaling", None) or 1.0),
        float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )
    _check_complete(model, parts)
    return parts


def _layer(layer: Any) -> LayerParts:
    attention, block = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = frozenset(name for name, child in layer.named_children() if isinstance(child, CompiledNorm))
    if attention is None or block is None or names not in _ORDERS:
        raise UnknownPartsError("layers of another kind")
    norms = tuple(None if name is None else getattr(layer, name) for name in _ORDERS[names])
    up = _joined(block, ("gate_proj", "up_proj"), "gate_up_proj") or getattr(block, "up_proj", None)
    linears = (_joined(attention, ("q_proj", "k_proj", "v_proj"), "qkv_proj"), getattr(attention, "o_proj", None), up,
               getattr(block, "down_proj", None))  # fmt: skip
    if not all(isinstance(linear, PackedLinear) for linear in linears):
        raise UnknownPartsError("linear layers that are not joined and packed")
    inner = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is not None and not isinstance(norm, CompiledNorm) for norm in inner) or (inner[0] is None) != (
        inner[1] is None
    ):
        raise UnknownPartsError("norms of queries and keys of another kind")
    return LayerParts(attention, *linears, norms, *inner, bool(getattr(attention, "use_rope", True)))  # type: ignore[arg-type]


def _joined(parent: nn.Module, names: tuple[str, ...], whole: str) -> Any:
    """Return the one layer that gives what several of these names do, or that has the name of them all."""
    return getattr(parent, whole, None) or common_layer([getattr(parent, name, None) for name in names])


def _is_gated(layers: list[LayerParts]) -> bool:
    widths = {layer.up.out_features / layer.down.in_features for layer in layers}
    if widths not in ({1.0}, {2.0}):
        raise UnknownPartsError("a block of another kind")
    return widths == {2.0}


def _activation(blocks: list[Any]) -> int:
    """Return the number of the formula that all blocks use, told by its values."""
    found: set[str | None] = set()
    for block in blocks:
        function = getattr(block, "act_fn", None) or getattr(block, "activation_fn", None)
        values = function(_SAMPLE) if isinstance(function, nn.Module) else None
        found.add(next((name for name, formula in _FORMULAS.items() if _is_close(values, formula(_SAMPLE))), None))
    name = found.pop()
    if found or name is None:
        raise UnknownPartsError("an activation of another kind")
    return ACTIVATIONS[name]


def _is_close(values: Tensor | None, expected: Tensor) -> bool:
    return values is not None and values.shape == expected.shape and torch.allclose(values, expected, atol=1e-5)


def _check_complete(model: nn.Module, parts: DecoderParts) -> None:
    known = [parts.embeddings, parts.norm, parts.head, *(module for layer in parts.layers for module in layer.modules)]
    linears = {id(module) for module in known if isinstance(module, PackedLinear)}
    if linears != {id(module) for module in model.modules() if isinstance(module, PackedLinear)}:
        raise UnknownPartsError("more linear layers")
    own = {id(parameter) for module in known for parameter in module.parameters()}
    if own != {id(parameter) for parameter in model.parameters()}:
        raise UnknownPartsError("more parameters")
    if len({norm.epsilon for module in known if isinstance(norm := module, CompiledNorm)}) != 1:
        raise UnknownPartsError("norms that differ")
