"""Recognises a decoder of the Llama kind by its parts, not by its name.

The parts are embeddings, layers, a norm and a head. A layer has attention and an MLP of two or three linear layers,
each with RMS norms before it, after it or both. Linear layers must be packed, those with the same input joined, and
norms compiled. No other parameter may exist. The parts do not show factors and caps, so these come from the
configuration. The comparison at load detects anything else that the model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from sie.workers.generation.norms import CompiledNorm
from sie.workers.generation.packed_weights import PackedLinear
from sie.workers.packed.formulas import UnknownPartsError, activation_of
from sie.workers.packed.sharing import common_layer

_ORDERS: dict[frozenset[str], tuple[str | None, str | None, str | None, str | None]] = {
    frozenset(name for name in order if name is not None): order
    for order in (
        ("input_layernorm", None, "post_attention_layernorm", None),
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    )
}
"""By the set of a layer's norms: their names before attention, after it, before the MLP and after it."""


class LayerParts(NamedTuple):
    """One layer. qkv computes queries, keys and values; up computes the gate and the values that it multiplies."""

    attention: nn.Module
    qkv: PackedLinear
    out: PackedLinear
    up: PackedLinear
    down: PackedLinear
    norms: tuple[CompiledNorm | None, CompiledNorm | None, CompiledNorm | None, CompiledNorm | None]
    """In the order of `_ORDERS`."""
    query_norm: CompiledNorm | None
    key_norm: CompiledNorm | None
    is_rotary: bool
    """Whether rotary factors apply to its queries and keys."""

    @property
    def modules(self) -> Iterator[nn.Module]:
        """All its modules that have parameters."""
        yield from (self.qkv, self.out, self.up, self.down)
        yield from (norm for norm in (*self.norms, self.query_norm, self.key_norm) if norm is not None)


class DecoderParts(NamedTuple):
    """A whole decoder. activation is a value of `sie.native.encoder.ACTIVATIONS`."""

    embeddings: nn.Embedding
    first: nn.Module
    """The library's module of the first layer."""
    layers: list[LayerParts]
    norm: CompiledNorm
    head: PackedLinear
    activation: int
    is_gated: bool
    residual_scale: float
    logit_scale: float
    logit_cap: float


def find_parts(model: Any) -> DecoderParts:
    """Return a model's parts. Raises UnknownPartsError unless all exist and together hold every parameter."""
    body, config = model.base_model, model.config.get_text_config()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = list(getattr(body, "layers", ()))
    norm = getattr(body, "norm", None)
    if not (modules and isinstance(embeddings, nn.Embedding) and isinstance(head, PackedLinear)):
        raise UnknownPartsError("unsupported embeddings, layers or head")
    if not isinstance(norm, CompiledNorm):
        raise UnknownPartsError("an unsupported last norm")
    layers = [_layer(module) for module in modules]
    blocks = [module.mlp for module in modules]
    parts = DecoderParts(
        embeddings,
        modules[0],
        layers,
        norm,
        head,
        activation_of(getattr(block, "act_fn", None) or getattr(block, "activation_fn", None) for block in blocks),
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
        raise UnknownPartsError("unsupported layers")
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
        raise UnknownPartsError("unsupported norms of queries and keys")
    return LayerParts(attention, *linears, norms, *inner, bool(getattr(attention, "use_rope", True)))  # type: ignore[arg-type]


def _joined(parent: nn.Module, names: tuple[str, ...], whole: str) -> Any:
    """Return the layer named `whole`, or the layer that the layers of these names were joined into."""
    return getattr(parent, whole, None) or common_layer([getattr(parent, name, None) for name in names])


def _is_gated(layers: list[LayerParts]) -> bool:
    widths = {layer.up.out_features / layer.down.in_features for layer in layers}
    if widths not in ({1.0}, {2.0}):
        raise UnknownPartsError("an unsupported MLP")
    return widths == {2.0}


def _check_complete(model: nn.Module, parts: DecoderParts) -> None:
    known = [parts.embeddings, parts.norm, parts.head, *(module for layer in parts.layers for module in layer.modules)]
    linears = {id(module) for module in known if isinstance(module, PackedLinear)}
    if linears != {id(module) for module in model.modules() if isinstance(module, PackedLinear)}:
        raise UnknownPartsError("additional linear layers")
    own = {id(parameter) for module in known for parameter in module.parameters()}
    if own != {id(parameter) for parameter in model.parameters()}:
        raise UnknownPartsError("additional parameters")
    if len({norm.epsilon for module in known if isinstance(norm := module, CompiledNorm)}) != 1:
        raise UnknownPartsError("norms with different epsilons")
