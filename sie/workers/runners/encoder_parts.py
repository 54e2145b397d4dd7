"""Recognises a transformer of packed texts by its parts, not by its name.

The parts are embeddings, layers and norms. A layer has attention and an MLP of two or three linear layers, with layer
norms or RMS norms before them, after them, or after the addition. No other parameter may exist, except a pooler's, which
is not used. The comparison at load detects anything else that the model does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sie.workers.packed.formulas import UnknownPartsError, activation_of, root_mean_square_of
from sie.workers.packed.rounded_linear import RoundedLinear

Linear = nn.Linear | RoundedLinear
_UNREAD = "pooler."
_LAYERS = ("encoder.layer", "transformer.layer", "layers")
_DISTANCES = "relative_attention_bias"
_POSITIONS, _TYPES = "embeddings.position_embeddings", "embeddings.token_type_embeddings"
_FIRST_NORMS, _LAST_NORMS = ("embeddings.LayerNorm", "embeddings.norm"), ("final_norm", "norm")
_QKV = (
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.qkv_proj",),
    ("attn.Wqkv",),
)
_OUT = ("attention.output.dense", "attention.attn.o", "attention.out_lin", "self_attn.o_proj", "attn.Wo")
_UP = (("intermediate.dense",), ("ffn.lin1",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_up_proj",), ("mlp.up_proj",),
       ("mlp.Wi",), ("mlp.fc1",))  # fmt: skip
"""The gate first, if there is one."""
_DOWN = ("output.dense", "ffn.lin2", "mlp.down_proj", "mlp.Wo", "mlp.fc2")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_Place = str | None
_Order = tuple[_Place, _Place, _Place, _Place, _Place, _Place]
_ORDERS: tuple[_Order, ...] = (
    (None, None, "attention.output.LayerNorm", None, None, "output.LayerNorm"),
    (None, None, "attention.LayerNorm", None, None, "output.LayerNorm"),
    (None, None, "sa_layer_norm", None, None, "output_layer_norm"),
    (None, None, "post_attention_layernorm", None, None, "post_mlp_layernorm"),
    ("attn_norm", None, None, "mlp_norm", None, None),
    (None, None, None, "mlp_norm", None, None),
    ("input_layernorm", None, None, "post_attention_layernorm", None, None),
    ("input_layernorm", "post_attention_layernorm", None, "pre_feedforward_layernorm", "post_feedforward_layernorm", None),
    ("input_layernorm", "post_self_attn_layernorm", None, "post_attention_layernorm", "post_mlp_layernorm", None),
    (None, "post_attention_layernorm", None, None, "post_feedforward_layernorm", None),
)  # fmt: skip
"""The names of a layer's norms: of the input of attention, of its result, of their sum, and the same of the MLP."""


class NormParts(NamedTuple):
    """A layer norm, or an RMS norm. weight and bias are (width,) float32."""

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    epsilon: float
    is_rms: bool


class LayerParts(NamedTuple):
    """One layer."""

    module: nn.Module
    attention: nn.Module
    """The module that gets rotary factors."""
    qkv: tuple[Linear, ...]
    """One, or those of queries, keys and values."""
    out: Linear
    up: tuple[Linear, ...]
    """One, or the gate's and that of the values that it multiplies."""
    down: Linear
    norms: tuple[NormParts | None, ...]
    """In the order of `_ORDERS`."""
    query_norm: NormParts | None
    key_norm: NormParts | None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All its linear layers."""
        return (*self.qkv, self.out, *self.up, self.down)

    @property
    def all_norms(self) -> list[NormParts]:
        """All its norms."""
        return [norm for norm in (*self.norms, self.query_norm, self.key_norm) if norm is not None]


class EncoderParts(NamedTuple):
    """A whole encoder."""

    words: nn.Embedding
    positions: nn.Embedding | None
    types: nn.Embedding | None
    first_norm: NormParts | None
    layers: list[LayerParts]
    last_norm: NormParts | None
    distances: nn.Module | None
    """The module that knows what scores get by the distance of two tokens (`compute_position_bias`), from a table."""

    @property
    def tables(self) -> list[nn.Embedding]:
        """All its embeddings."""
        return [table for table in (self.words, self.positions, self.types) if table is not None]

    @property
    def norms(self) -> list[NormParts]:
        """All its norms."""
        own = [norm for norm in (self.first_norm, self.last_norm) if norm is not None]
        return own + [norm for layer in self.layers for norm in layer.all_norms]

    @property
    def linears(self) -> list[Linear]:
        """All its linear layers."""
        return [linear for layer in self.layers for linear in layer.linears]

    @property
    def is_gated(self) -> bool:
        """Whether the MLPs multiply a gate and other values. Raises UnknownPartsError if shapes fit neither way."""
        widths = {sum(part.out_features for part in layer.up) / layer.down.in_features for layer in self.layers}
        if widths not in ({1.0}, {2.0}):
            raise UnknownPartsError("an unsupported MLP")
        return widths == {2.0}

    @property
    def activation(self) -> int:
        """Return the number of the activation of all layers. Raises UnknownPartsError if the compiled library lacks it."""
        return activation_of(module for layer in self.layers for module in _functions(layer.module))


def find_parts(model: nn.Module) -> EncoderParts:
    """Return a model's parts. Raises UnknownPartsError unless all exist and together hold every parameter."""
    words = model.get_input_embeddings()  # type: ignore[operator]  # every transformers model has it
    layers = list(_first(model, _LAYERS, nn.ModuleList) or ())
    if not isinstance(words, nn.Embedding) or not layers:
        raise UnknownPartsError("unsupported embeddings or layers")
    parts = EncoderParts(
        words,
        _first(model, (_POSITIONS,), nn.Embedding),
        _first(model, (_TYPES,), nn.Embedding),
        _norm(_first(model, _FIRST_NORMS)),
        [_layer(layer) for layer in layers],
        _norm(_first(model, _LAST_NORMS)),
        next((module for module in model.modules() if hasattr(module, _DISTANCES)), None),
    )
    known = [*parts.tables, *parts.linears, *(norm.module for norm in parts.norms)]
    if parts.distances is not None:
        known.append(getattr(parts.distances, _DISTANCES))
    own = {id(parameter) for name, parameter in model.named_parameters() if not name.startswith(_UNREAD)}
    if own != {id(parameter) for module in known for parameter in module.parameters()}:
        raise UnknownPartsError("additional parameters")
    return parts


def _layer(layer: nn.Module) -> LayerParts:
    qkv, up = _all_of(layer, _QKV), _all_of(layer, _UP)
    out, down = _first(layer, _OUT, Linear), _first(layer, _DOWN, Linear)
    if not qkv or not up or out is None or down is None:
        raise UnknownPartsError("unsupported linear layers")
    norms = {name: norm for name, module in layer.named_modules() if (norm := _norm(module)) is not None}
    query, key = (norms.pop(name, None) for name in _HEAD_NORMS)
    order = next((order for order in _ORDERS if {name for name in order if name is not None} == set(norms)), None)
    if order is None or (query is None) != (key is None):
        raise UnknownPartsError("unsupported norms")
    places = tuple(None if name is None else norms[name] for name in order)
    return LayerParts(layer, _attention(layer), qkv, out, up, down, places, query, key)


def _attention(layer: nn.Module) -> nn.Module:
    found = _first(layer, ("self_attn", "attn", "attention"))
    assert found is not None  # a linear layer was found in it
    return found


def _norm(module: nn.Module | None) -> NormParts | None:
    """Return a norm's parts, or None for any other module."""
    if isinstance(module, nn.LayerNorm):
        bias: Tensor | None = module.bias  # torch's annotation omits None
        if not module.elementwise_affine:
            return None
        return NormParts(
            module, module.weight.detach().float(), None if bias is None else bias.detach().float(), module.eps, is_rms=False
        )  # fmt: skip
    with torch.inference_mode():
        found = None if module is None else root_mean_square_of(module)
    return None if module is None or found is None else NormParts(module, found[0], None, found[1], is_rms=True)


def _functions(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer's modules that have no parameters, parts or state: its activation, without dropouts."""
    for module in layer.modules():
        is_plain = not any(True for _ in (*module.children(), *module.parameters(), *module.buffers()))
        if is_plain and not isinstance(module, nn.Dropout | nn.Identity):
            yield module


def _first(parent: nn.Module, names: tuple[str, ...], kind: Any = nn.Module) -> Any:
    """Return the first submodule of these names, if it is of a kind; else None."""
    for name in names:
        try:
            found = parent.get_submodule(name)
        except AttributeError:
            continue
        return found if isinstance(found, kind) else None
    return None


def _all_of(parent: nn.Module, choices: tuple[tuple[str, ...], ...]) -> tuple[Linear, ...]:
    """Return the linear layers of the first choice whose names all exist; empty if there is none."""
    for names in choices:
        found = tuple(_first(parent, (name,), Linear) for name in names)
        if all(part is not None for part in found):
            return found
    return ()
