"""Runs a transformer of the BERT kind as one call of the compiled library for each step.

A model is recognised by its parts, not by its name: embeddings, and layers of attention and two linear layers, each
with its norm. It must have no other parameter, except a pooler's, which is not used. `sie.workers.runners.probe` then
compares both ways to run the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sie.native.attention import MAX_WIDTH
from sie.native.encoder import (
    ACTIVATIONS,
    Dense,
    Encoder,
    EncoderStep,
    Layer,
    Norm,
    choose_int8_level,
    choose_level,
    empty_aligned,
    encoder_scratch_bytes,
    pack_bytes,
    pack_panels,
    pad_panels,
    run_encoder,
)
from sie.workers.packed.batch import PackedBatch
from sie.workers.packed.rounded_linear import MAX_INPUTS, RoundedLinear

Linear = nn.Linear | RoundedLinear
_UNREAD = "pooler."


class _Names(NamedTuple):
    """A family's names of its parts."""

    layers: str
    attention: tuple[str, str, str]
    linears: tuple[str, str, str]
    """After attention, and of the MLP."""
    norms: tuple[str, str]


_EMBEDDINGS = "embeddings"
_FAMILIES = (
    _Names(
        "encoder.layer",
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        ("attention.output.dense", "intermediate.dense", "output.dense"),
        ("attention.output.LayerNorm", "output.LayerNorm"),
    ),
    _Names(
        "transformer.layer",
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        ("attention.out_lin", "ffn.lin1", "ffn.lin2"),
        ("sa_layer_norm", "output_layer_norm"),
    ),
)
"""BERT and similar models (RoBERTa, XLM-R, CamemBERT, MiniLM, ELECTRA without a projection); DistilBERT."""


class _Parts(NamedTuple):
    words: nn.Embedding
    positions: nn.Embedding
    types: nn.Embedding | None
    norm: nn.LayerNorm
    layers: list[tuple[tuple[Linear, ...], tuple[nn.LayerNorm, ...]]]
    """Query, key, value, out, up, down; the norms after attention and after the MLP."""


class CompiledEncoder:
    """Holds a model's weights in the library's layout, and runs steps on them. Used by one thread at a time."""

    def __init__(self, model: nn.Module, parts: _Parts, activation: int, level: int) -> None:
        self._kept: list[Any] = [model]
        """Objects whose memory the structs point to."""
        self._dtype = parts.words.weight.dtype
        self._is_bf16 = self._dtype == torch.bfloat16
        self.memory_bytes = 0
        """Bytes of the weights in the library's layout, in addition to the model's own."""
        config: Any = model.config
        self._width: int = parts.words.embedding_dim
        layers = (Layer * len(parts.layers))(*(self._layer(*layer) for layer in parts.layers))
        self._kept.append(layers)
        self._record = Encoder(
            parts.words.weight.data_ptr(),
            parts.positions.weight.data_ptr(),
            None if parts.types is None else parts.types.weight.data_ptr(),
            self._norm(parts.norm),
            ctypes.cast(layers, ctypes.POINTER(Layer)),
            len(parts.layers),
            self._width,
            config.num_attention_heads,
            activation,
            parts.norm.eps,
            (self._width // config.num_attention_heads) ** -0.5,
            max(layer[0][4].out_features for layer in parts.layers),
            level,
        )
        self._scratch = empty_aligned(0)

    def run(self, batch: PackedBatch, position_offset: int) -> Tensor:
        """Return (t, d) hidden states in the model's format; ids, positions and types must be in its tables."""
        num_tokens = len(batch.input_ids)
        num_threads = torch.get_num_threads()
        num_bytes = encoder_scratch_bytes(self._record, num_tokens, batch.max_length, num_threads)
        if len(self._scratch) < num_bytes:
            self._scratch = empty_aligned(num_bytes)
        positions = batch.position_ids + position_offset if position_offset else batch.position_ids
        hidden = torch.empty(num_tokens, self._width, dtype=self._dtype)
        step = EncoderStep(
            batch.input_ids.ctypes.data,
            positions.ctypes.data,
            None if batch.token_types is None else batch.token_types.ctypes.data,
            batch.cu_seqlens.ctypes.data,
            None if batch.attended is None else batch.attended.ctypes.data,
            hidden.data_ptr(),
            self._scratch.ctypes.data,
            num_tokens,
            len(batch.cu_seqlens) - 1,
            batch.max_length,
            num_threads,
        )
        run_encoder(self._record, step)
        return hidden

    def _layer(self, linears: tuple[Linear, ...], norms: tuple[nn.LayerNorm, ...]) -> Layer:
        query, key, value, out, up, down = linears
        projections = self._linear(query, key, value)
        return Layer(projections, *map(self._linear, (out, up, down)), *map(self._norm, norms))

    def _linear(self, *parts: Linear) -> Dense:
        """Pack linear layers with the same input as one layer."""
        rounded = [part for part in parts if isinstance(part, RoundedLinear)]
        if rounded:
            return self._rounded(rounded)
        weight = torch.cat([part.weight for part in parts if isinstance(part, nn.Linear)])
        outputs, inputs = weight.shape
        panels = pack_panels(weight.data_ptr(), outputs, inputs, is_bf16=self._is_bf16)
        bias = self._floats(torch.cat([_bias(part) for part in parts]))
        self._keep(panels)
        return Dense(panels.ctypes.data, bias, None, None, inputs, outputs)

    def _rounded(self, parts: list[RoundedLinear]) -> Dense:
        panels = pack_bytes(torch.cat([part.numbers for part in parts]).numpy())
        bias = self._floats(torch.cat([_bias(part) for part in parts]))
        scales, sums = (
            pad_panels(torch.cat(values).numpy())
            for values in ([part.scales for part in parts], [part.sums for part in parts])
        )
        for array in (panels, scales, sums):
            self._keep(array)
        outputs = sum(part.out_features for part in parts)
        return Dense(panels.ctypes.data, bias, scales.ctypes.data, sums.ctypes.data, parts[0].in_features, outputs)

    def _norm(self, norm: nn.LayerNorm) -> Norm:
        return Norm(self._floats(norm.weight), self._floats(norm.bias))

    def _floats(self, values: Tensor) -> int:
        array = values.detach().float().numpy().copy()
        self._keep(array)
        return array.ctypes.data

    def _keep(self, array: np.ndarray) -> None:
        self._kept.append(array)
        self.memory_bytes += array.nbytes


def compile_encoder(model: nn.Module) -> CompiledEncoder | None:
    """Return the compiled form of a model on the CPU, or None if its parts differ or the library cannot run it."""
    parts = _parts_of(model)
    if parts is None or parts.words.weight.device.type != "cpu":
        return None
    config: Any = model.config
    activation = ACTIVATIONS.get(str(getattr(config, "hidden_act", None) or getattr(config, "activation", None)))
    dtype = parts.words.weight.dtype
    if activation is None or dtype not in (torch.bfloat16, torch.float32) or not _has_plain_shapes(model, parts):
        return None
    level = _choose_level(parts, is_bf16=dtype == torch.bfloat16)
    if level is None:
        return None
    return CompiledEncoder(model, parts, activation, level)


def find_linears(model: nn.Module) -> list[nn.Linear]:
    """Return all linear layers of a model of one of the families; an empty list for any other model."""
    parts = _parts_of(model)
    linears = [] if parts is None else [linear for layer, _ in parts.layers for linear in layer]
    return [linear for linear in linears if isinstance(linear, nn.Linear)]


def _parts_of(model: nn.Module) -> _Parts | None:
    return next((found for names in _FAMILIES if (found := _find_parts(model, names)) is not None), None)


def _choose_level(parts: _Parts, *, is_bf16: bool) -> int | None:
    linears = [linear for layer, _ in parts.layers for linear in layer]
    inputs = {linear.in_features for linear in linears}
    if isinstance(linears[0], RoundedLinear):
        return choose_int8_level(is_bf16=is_bf16) if max(inputs) <= MAX_INPUTS else None
    return choose_level(is_bf16=is_bf16, inputs=inputs)


def _find_parts(model: nn.Module, names: _Names) -> _Parts | None:
    """Return a model's parts, or None unless all exist and together hold every parameter."""
    try:
        has_types = hasattr(_part(model, _EMBEDDINGS), "token_type_embeddings")
        parts = _Parts(
            _part(model, f"{_EMBEDDINGS}.word_embeddings"),
            _part(model, f"{_EMBEDDINGS}.position_embeddings"),
            _part(model, f"{_EMBEDDINGS}.token_type_embeddings") if has_types else None,
            _part(model, f"{_EMBEDDINGS}.LayerNorm"),
            [
                (
                    tuple(_part(layer, name) for name in (*names.attention, *names.linears)),
                    tuple(_part(layer, name) for name in names.norms),
                )
                for layer in _part(model, names.layers).children()
            ],
        )
    except AttributeError:
        return None
    known = {id(parameter) for module in _modules(parts) for parameter in module.parameters()}
    own = {id(parameter) for name, parameter in model.named_parameters() if not name.startswith(_UNREAD)}
    return parts if own == known else None


def _part(model: nn.Module, path: str) -> Any:
    """Return a submodule; `_has_plain_shapes` checks its kind. Raises AttributeError if it does not exist."""
    return model.get_submodule(path)


def _modules(parts: _Parts) -> Iterator[nn.Module]:
    yield from (parts.words, parts.positions, parts.norm)
    if parts.types is not None:
        yield parts.types
    for linears, norms in parts.layers:
        yield from linears
        yield from norms


def _has_plain_shapes(model: nn.Module, parts: _Parts) -> bool:
    """Tell whether parts are plain modules in one format, with shapes that fit each other and the library."""
    config: Any = model.config
    width = parts.words.embedding_dim
    heads = int(getattr(config, "num_attention_heads", 0))
    tables = [table for table in (parts.words, parts.positions, parts.types) if table is not None]
    norms = [parts.norm, *(norm for _, layer in parts.layers for norm in layer)]
    linears = [linear for layer, _ in parts.layers for linear in layer]
    modules = [*tables, *norms, *linears]
    is_rounded = any(isinstance(linear, RoundedLinear) for linear in linears)
    wanted = {nn.Embedding: tables, nn.LayerNorm: norms, RoundedLinear if is_rounded else nn.Linear: linears}
    is_plain = all(isinstance(module, kind) for kind, group in wanted.items() for module in group)
    return (
        is_plain
        and bool(parts.layers)
        and heads > 0
        and width % heads == 0
        and (width // heads) % 2 == 0
        and width // heads <= MAX_WIDTH
        and all(parameter.dtype == parts.words.weight.dtype for module in modules for parameter in module.parameters())
        and all(table.embedding_dim == width and table.weight.is_contiguous() for table in tables)
        and all(norm.eps == parts.norm.eps and norm.normalized_shape == (width,) for norm in norms)
        and all(_fits(layer, width) for layer, _ in parts.layers)
    )


def _fits(linears: tuple[Linear, ...], width: int) -> bool:
    *attention, up, down = ((linear.out_features, linear.in_features) for linear in linears)
    inner = up[0]
    is_square = all(shape == (width, width) for shape in attention)
    return is_square and inner % 2 == 0 and up == (inner, width) and down == (width, inner)


def _bias(linear: Linear) -> Tensor:
    bias: Tensor | None = linear.bias  # torch's annotation leaves None out
    return torch.zeros(linear.out_features) if bias is None else bias.float()
