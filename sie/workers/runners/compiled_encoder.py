"""Runs a transformer of packed texts as one call of the compiled library for each step.

A model is recognised by its parts (`sie.workers.runners.encoder_parts`). A forward pass shows what the parts do not: each
layer's attention and rotary factors, and the factor of the embeddings. `sie.workers.runners.probe` then compares both ways
to run the model.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from sie.native.attention import MAX_WIDTH
from sie.native.encoder import (
    Dense,
    Encoder,
    EncoderStep,
    Layer,
    Level,
    Norm,
    WeightRoom,
    choose_int8_level,
    choose_level,
    empty_aligned,
    encoder_scratch_bytes,
    pack_bytes,
    pack_panels,
    pad_panels,
    run_encoder,
)
from sie.native.team import num_threads
from sie.workers.device.memory import measure
from sie.workers.packed import attention
from sie.workers.packed.attention import AttentionRule, Boundaries, packed_step
from sie.workers.packed.batch import PackedBatch, pack_sequences
from sie.workers.packed.formulas import UnknownPartsError, embedding_scale
from sie.workers.packed.rotary_tables import RotaryTable, Seen, point_to_tables, rotary_tables, watching
from sie.workers.packed.rounded_linear import MAX_INPUTS, RoundedLinear
from sie.workers.prepared import session
from sie.workers.runners.encoder_parts import EncoderParts, LayerParts, Linear, NormParts, find_parts

_GATE_OUTPUTS = 16
"""Outputs of the gate in each panel, and of the values beside them: half of a panel."""

_MOST_DISTANCES = 4096
_MOST_WINDOW = 1 << 24
"""Longer than any sequence. The library computes with twice a window in 32 bits."""
_QUERY_SCALES = "llama_4_scaling_beta"
"""The rotary parameter of models whose queries grow at far positions, which no short text shows (Ministral 3)."""
_SPARE_KEYS = 16
"""Behind a sequence's last key the library reads as many biases as fill a vector, and uses none."""


class ObservedForms(NamedTuple):
    """Facts seen in a forward pass."""

    rules: Sequence[AttentionRule]
    tables: Sequence[RotaryTable | None]
    embedding_scale: float
    biases: Tensor | None = None
    """The bias of a score by the distance of two tokens, (heads, 2 n), with n in its middle; None: no biases."""


class CompiledEncoder:
    """Holds a model's weights in the library's layout, and runs steps on them. Used by one thread at a time."""

    def __init__(self, model: nn.Module, parts: EncoderParts, seen: ObservedForms, level: Level) -> None:
        self._kept: list[Any] = [model]
        """Objects whose memory the structs point to."""
        self._room = WeightRoom()
        self._dtype = parts.words.weight.dtype
        self._is_bf16 = self._dtype == torch.bfloat16
        self.memory_bytes = 0
        """Bytes of the weights in the library's layout, in addition to the model's own."""
        self.max_positions = sys.maxsize if parts.positions is None else parts.positions.num_embeddings
        """Positions in its table: the last position of a step must be less."""
        self._width: int = parts.words.embedding_dim
        self._is_gated = parts.is_gated
        self._tables = seen.tables
        self._biases = seen.biases
        self._layers = (Layer * len(parts.layers))(*map(self._layer, parts.layers, seen.rules))
        rule, norm = seen.rules[0], parts.norms[0]
        table = next((table for table in seen.tables if table is not None), None)
        self._record = Encoder(
            parts.words.weight.data_ptr(),
            None if parts.positions is None else parts.positions.weight.data_ptr(),
            None if parts.types is None else parts.types.weight.data_ptr(),
            self._norm(parts.first_norm), self._norm(parts.last_norm),
            ctypes.cast(self._layers, ctypes.POINTER(Layer)),
            len(parts.layers), self._width, rule.num_heads, rule.num_key_heads, rule.head_width,
            0 if table is None else table.cosines.shape[1],
            max(layer.down.in_features for layer in parts.layers), parts.activation, self._is_gated, norm.is_rms, level,
            0 if seen.biases is None else seen.biases.shape[1] // 2, norm.epsilon, seen.embedding_scale, _residual_scale(model),
        )  # fmt: skip
        dense = [linear for one in self._layers for linear in (one.qkv, one.out, one.up, one.down)]
        self._num_weights = sum(linear.inputs * linear.outputs for linear in dense)
        self._num_positions = point_to_tables(self._layers, self._tables)
        self._scratch = empty_aligned(0)

    def run(self, batch: PackedBatch, position_offset: int) -> Tensor:
        """Return (t, d) hidden states in the model's format; ids, positions and types must be in its tables."""
        num_tokens = len(batch.input_ids)
        threads = num_threads(torch.get_num_threads(), self._num_weights, num_tokens)
        num_bytes = encoder_scratch_bytes(self._record, num_tokens, batch.max_length, threads)
        if len(self._scratch) < num_bytes:
            self._scratch = empty_aligned(num_bytes)
        if batch.max_length + position_offset > self._num_positions:
            self._num_positions = point_to_tables(self._layers, self._tables, batch.max_length + position_offset)
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
            threads,
        )
        run_encoder(self._record, step)
        return hidden

    def _layer(self, layer: LayerParts, rule: AttentionRule) -> Layer:
        norm = layer.query_norm
        return Layer(
            self._linear(layer.qkv), self._linear((layer.out,)), self._linear(layer.up, is_gated=self._is_gated),
            self._linear((layer.down,)), *map(self._norm, layer.norms), self._norm(norm), self._norm(layer.key_norm),
            None if self._biases is None else self._biases.data_ptr(), None, None, rule.scale,
            min(rule.window or 0, _MOST_WINDOW), rule.is_causal,
            norm is not None and len(norm.weight) != rule.head_width,
        )  # fmt: skip

    def _linear(self, parts: Sequence[Linear], *, is_gated: bool = False) -> Dense:
        """Pack linear layers with the same input as one layer."""
        rounded = [part for part in parts if isinstance(part, RoundedLinear)]
        order = _gated if is_gated else _as_it_is
        has_bias = any(part.bias is not None for part in parts)
        bias = self._floats(order(torch.cat([_bias(part) for part in parts]))) if has_bias else None
        inputs = parts[0].in_features
        outputs = len(order(torch.empty(sum(part.out_features for part in parts), 1, device="meta")))
        if rounded:
            return self._rounded(rounded, order, bias, outputs)

        def pack() -> np.ndarray:
            weight = order(torch.cat([part.weight for part in parts if isinstance(part, nn.Linear)]))
            return pack_panels(weight.data_ptr(), outputs, inputs, self._room, is_bf16=self._is_bf16).view(np.uint8)

        panels = session.array("panels", pack, f"{self._dtype} {outputs, inputs}")
        self._keep(panels)
        return Dense(panels.ctypes.data, bias, None, None, inputs, outputs)

    def _rounded(
        self, parts: list[RoundedLinear], order: Callable[[Tensor], Tensor], bias: int | None, outputs: int
    ) -> Dense:
        def pack() -> np.ndarray:
            numbers = order(torch.cat([part.numbers for part in parts]))
            return pack_bytes(numbers.numpy(), self._room).view(np.uint8)

        panels = session.array("panels", pack, f"int8 {outputs, parts[0].in_features}")
        scales, sums = (
            pad_panels(order(torch.cat(values)).numpy())
            for values in ([part.scales for part in parts], [part.sums for part in parts])
        )
        for array in (panels, scales, sums):
            self._keep(array)
        return Dense(panels.ctypes.data, bias, scales.ctypes.data, sums.ctypes.data, parts[0].in_features, outputs)

    def _norm(self, norm: NormParts | None) -> Norm:
        if norm is None:
            return Norm(None, None)
        return Norm(self._floats(norm.weight), None if norm.bias is None else self._floats(norm.bias))

    def _floats(self, values: Tensor) -> int:
        array = values.detach().float().numpy().copy()
        self._keep(array)
        return array.ctypes.data

    def _keep(self, array: np.ndarray) -> None:
        self._kept.append(array)
        self.memory_bytes += array.nbytes


def _as_it_is(values: Tensor) -> Tensor:
    return values


def _gated(values: Tensor) -> Tensor:
    """Return the outputs of a gate and then of its values, (2 n, ...), as panels hold them: 16 of each in turn."""
    halves = values.unflatten(0, (2, -1))
    missing = -halves.shape[1] % _GATE_OUTPUTS
    if missing:
        halves = torch.cat((halves, halves.new_zeros(2, missing, *halves.shape[2:])), 1)
    return halves.unflatten(1, (-1, _GATE_OUTPUTS)).transpose(0, 1).flatten(0, 2).contiguous()


def compile_encoder(model: nn.Module) -> CompiledEncoder:
    """Return the compiled form of a model on the CPU, at its first call after the model's conversion.

    Raises UnknownPartsError, with the reason, if its parts differ or the library cannot run it.
    """
    parts = find_parts(model)
    dtype = parts.words.weight.dtype
    if parts.words.weight.device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        raise UnknownPartsError("no kernels for its device or format")
    config: Any = model.config
    if _QUERY_SCALES in (getattr(config.get_text_config(), "rope_parameters", None) or {}):
        raise UnknownPartsError("queries that are scaled by their positions")
    level = _choose_level(parts, is_bf16=dtype == torch.bfloat16)
    _check_modules(parts)
    if not session.is_skeleton():  # the packed weights lie in the file already
        _check_memory(parts)
    seen = _observe(model, parts)
    _check_shapes(parts, seen.rules)
    return CompiledEncoder(model, parts, seen, level)


def find_linears(model: nn.Module) -> list[nn.Linear]:
    """Return all linear layers of a model of the BERT kind, whose norms are behind additions; else an empty list.

    The loss by eight bits was measured for such models only.
    """
    try:
        parts = find_parts(model)
    except UnknownPartsError:
        return []
    is_behind = all(norm is None for layer in parts.layers for norm in (*layer.norms[:2], *layer.norms[3:5]))
    return [linear for linear in parts.linears if isinstance(linear, nn.Linear)] if is_behind else []


def _choose_level(parts: EncoderParts, *, is_bf16: bool) -> Level:
    inputs = {linear.in_features for linear in parts.linears}
    if isinstance(parts.linears[0], RoundedLinear):
        level = choose_int8_level(is_bf16=is_bf16) if max(inputs) <= MAX_INPUTS else None
    else:
        level = choose_level(is_bf16=is_bf16, inputs=inputs)
    if level is None:
        raise UnknownPartsError("no kernels for its format on this processor")
    return level


def _observe(model: nn.Module, parts: EncoderParts) -> ObservedForms:
    """Run a packed forward pass of a few tokens, and return each layer's observed inputs."""
    config: Any = model.config
    if parts.distances is not None:
        return _forms_by_distance(config, parts, cast("Any", parts.distances))
    batch = pack_sequences([np.arange(1, 6) % parts.words.num_embeddings])
    boundaries = Boundaries(torch.from_numpy(batch.cu_seqlens), batch.runs, batch.max_length)
    boundaries.rules = []
    ids = torch.from_numpy(batch.input_ids)[None]
    own = config._attn_implementation or "eager"
    attention.register()
    transformer = cast("Any", model)
    try:
        transformer.set_attn_implementation(attention.NAME)
        with (
            torch.inference_mode(),
            packed_step(boundaries),
            watching(model, parts.layers[0].module, [layer.attention for layer in parts.layers]) as seen,
        ):
            transformer(input_ids=ids, position_ids=torch.from_numpy(batch.position_ids)[None])
    except Exception as error:  # an unknown architecture may raise anything; the library still runs it
        raise UnknownPartsError(f"{type(error).__name__}: {error}") from error
    finally:
        transformer.set_attn_implementation(own)
    rules = boundaries.rules
    if len(rules) != len(parts.layers) or any(
        rule.module not in set(layer.module.modules()) for rule, layer in zip(rules, parts.layers, strict=True)
    ):
        raise UnknownPartsError("layers that do not attend once, in their order")
    return ObservedForms(rules, _tables_of(seen, rules), _scale_of(config, parts, seen, ids[0]))


def _forms_by_distance(config: Any, parts: EncoderParts, distances: Any) -> ObservedForms:
    """Return the forms of a model whose scores depend on distances: its attention is none that others could compute."""
    length = 0 if parts.positions is None else parts.positions.num_embeddings
    heads = int(getattr(config, "num_attention_heads", 0))
    if not 0 < length <= _MOST_DISTANCES or not heads or not hasattr(distances, "compute_position_bias"):
        raise UnknownPartsError("unsupported distances")
    head = parts.words.embedding_dim // heads
    with torch.inference_mode():
        of_pairs = distances.compute_position_bias(parts.words.weight.new_zeros(1, length, 1))[0].float()
    biases = torch.zeros(heads, 2 * (length + _SPARE_KEYS))
    middle = biases.shape[1] // 2
    biases[:, middle : middle + length] = of_pairs[:, 0]
    biases[:, middle - length + 1 : middle + 1] = of_pairs[:, :, 0].flip(1)
    scale = head**-0.5
    rules = [
        AttentionRule(layer.attention, heads, heads, head, head, scale, is_causal=False, window=None)
        for layer in parts.layers
    ]
    return ObservedForms(rules, [None] * len(rules), 1.0, biases / scale)


def _tables_of(seen: Seen, rules: Sequence[AttentionRule]) -> list[RotaryTable | None]:
    if not seen.calls:
        return [None] * len(rules)
    return rotary_tables(seen, [getattr(rule.module, "use_rope", True) for rule in rules], rules[0].head_width)


def _scale_of(config: Any, parts: EncoderParts, seen: Seen, ids: Tensor) -> float:
    """Return the factor of the embeddings: 1 if other tables are added to them or a norm follows."""
    if parts.first_norm is not None or len(parts.tables) > 1:
        return 1.0
    return embedding_scale(config.get_text_config(), parts.words.weight[ids], seen.first)


def _residual_scale(model: nn.Module) -> float:
    config: Any = model.config
    return float(getattr(config.get_text_config(), "residual_multiplier", None) or 1.0)


def _check_memory(parts: EncoderParts) -> None:
    """Raise UnknownPartsError if packed weights would take over half of the memory that is left.

    That may change, so no file keeps what this load finds out.
    """
    needed = sum(
        tensor.nbytes
        for linear in parts.linears
        for tensor in (*linear.parameters(), *linear.buffers())
        if tensor.dim() > 1
    )
    memory = measure("cpu")
    if memory.total_bytes and needed > memory.available_bytes // 2:
        reason = (
            f"its packed weights need {needed >> 20} MiB, and {memory.available_bytes >> 20} MiB of memory are left"
        )
        session.abandon(reason)
        raise UnknownPartsError(reason)


def _check_modules(parts: EncoderParts) -> None:
    """Raise UnknownPartsError unless parts are plain modules in one format, with norms of one kind."""
    width, dtype = parts.words.embedding_dim, parts.words.weight.dtype
    is_rounded = any(isinstance(linear, RoundedLinear) for linear in parts.linears)
    modules = (*parts.tables, *parts.linears, *(norm.module for norm in parts.norms))
    if not (
        all(isinstance(linear, RoundedLinear if is_rounded else nn.Linear) for linear in parts.linears)
        and all(parameter.dtype == dtype for module in modules for parameter in module.parameters())
        and all(table.embedding_dim == width and table.weight.is_contiguous() for table in parts.tables)
        and len({(norm.is_rms, norm.epsilon) for norm in parts.norms}) == 1
    ):
        raise UnknownPartsError("parts of several formats or kinds")


def _check_shapes(parts: EncoderParts, rules: Sequence[AttentionRule]) -> None:
    """Raise UnknownPartsError for shapes that do not fit each other and the library."""
    width = parts.words.embedding_dim
    first = rules[0]
    heads, keys, head = first.num_heads, first.num_key_heads, first.head_width
    outer = {len(norm.weight) for norm in (parts.first_norm, parts.last_norm) if norm is not None}
    for layer, rule in zip(parts.layers, rules, strict=True):
        inner = layer.down.in_features
        given = sum(part.out_features for part in layer.qkv)
        outer |= {len(norm.weight) for norm in layer.norms if norm is not None}
        turned = (
            {(len(layer.query_norm.weight), len(layer.key_norm.weight))}
            if layer.query_norm and layer.key_norm
            else set()
        )
        if not (
            (rule.num_heads, rule.num_key_heads, rule.head_width, rule.value_width) == (heads, keys, head, head)
            and given == (heads + 2 * keys) * head
            and {part.in_features for part in (*layer.qkv, *layer.up)} == {width}
            and (layer.out.in_features, layer.out.out_features, layer.down.out_features) == (heads * head, width, width)
            and len({part.out_features for part in layer.up}) == 1
            and turned <= {(head, head), (heads * head, keys * head)}
            and inner % 2 == 0
            and rule.scale > 0
        ):
            raise UnknownPartsError("unsupported shapes")
    if outer - {width} or width % 2 or head % 2 or head > MAX_WIDTH or heads % keys:
        raise UnknownPartsError("unsupported shapes")


def _bias(linear: Linear) -> Tensor:
    bias: Tensor | None = linear.bias  # torch's annotation leaves None out
    return torch.zeros(linear.out_features) if bias is None else bias.float()
