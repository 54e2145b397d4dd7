"""The weight formats of a generating model on a CPU, and the layers that compute with them.

A generating model reads all its weights for every token, so their size sets its speed. Linear layers are packed for the
compiled kernels (`sie.native.linear`): as bfloat16, or in eight or four bits with a float16 scale for each 32 inputs of
an output. Without the kernels, torch computes with the same rounded weights.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sie.native.encoder import empty_aligned
from sie.native.linear import (
    GROUP_INPUTS,
    TILE_OUTPUTS,
    LinearCall,
    Matrix,
    WeightFormat,
    can_multiply,
    pack_bf16,
    pack_int4,
    pack_int8,
    packed_bytes,
    run_linear,
    scratch_bytes,
)
from sie.workers.device.cores import on_all_cores
from sie.workers.packed.sharing import SharedLinear
from sie.workers.prepared import session

Bits = Literal[16, 8, 4]

_FORMATS: dict[Bits, WeightFormat] = {16: WeightFormat.BF16, 8: WeightFormat.INT8, 4: WeightFormat.INT4}
_CODES = np.array([-127, -100, -80, -62, -47, -34, -21, -9, 3, 15, 28, 41, 55, 71, 89, 112], np.int8)
# The 16 values with the least squared error for normal weights, if each group's largest weight becomes -1. Found by
# Lloyd's algorithm on 400,000 groups of 32, weighted by the square of the scale. In units of 1/127, since kernels
# multiply integers.
CODEBOOK = _CODES.astype(np.float32) / 127
_STEPS = 254
"""The midpoints of adjacent values lie on a grid of half codes."""
_NEAREST = torch.bucketize(
    (torch.arange(2 * _STEPS) + 0.5) / _STEPS - 1, torch.from_numpy(CODEBOOK[1:] + CODEBOOK[:-1]) / 2
)
"""Indices into the codebook by steps above -1; a lookup takes a quarter of the time of a search."""
_LEAST_BITS: Bits = 4
_STARTS = (-1.0, -0.9, 1.0, 0.9)
"""Scales to try, relative to a group's largest weight. The best one is then refined once for its own codes.
More scales would reduce the error by only 3 %."""
_CHUNK_OUTPUTS = 512
"""Rows packed at a time, so that the temporary copies of an output head stay small and in cache. A multiple of a tile's."""
_local = threading.local()


class Quantised:
    """A matrix of rounded weights (outputs, inputs): codes and scales, or plain bfloat16 for 16 bits."""

    def __init__(self, weight: Tensor, bits: Bits) -> None:
        """Round weight (outputs, inputs), float32 or bfloat16, without keeping a reference to it."""
        self.bits: Bits = bits
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self.packed = session.array("packed", lambda: _pack(weight, bits), f"{bits} bits of {self.shape}")


def _pack(weight: Tensor, bits: Bits) -> NDArray[np.uint8]:
    outputs, inputs = weight.shape
    whole = empty_aligned(packed_bytes(outputs, inputs, _FORMATS[bits]))
    tile_bytes = packed_bytes(1, inputs, _FORMATS[bits])

    def pack(start: int) -> None:
        part = _pack_rows(weight[start : start + _CHUNK_OUTPUTS], bits)
        first = start // TILE_OUTPUTS * tile_bytes
        whole[first : first + part.nbytes] = part

    on_all_cores(pack, range(0, outputs, _CHUNK_OUTPUTS))
    return whole


def _pack_rows(rows: Tensor, bits: Bits) -> NDArray[np.uint8]:
    if bits == 16:
        return pack_bf16(rows.to(torch.bfloat16).contiguous().view(torch.uint16).numpy())
    if bits == 8:
        return pack_int8(*round_int8(rows.float()))
    return pack_int4(*round_int4(rows.float()))


def round_int8(weight: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Return the numbers -127 to 127 and the scales (outputs, groups) of float32 weights."""
    groups = _groups(weight)
    scales = (groups.abs().amax(2) / 127).half()
    wide = scales.float().clamp_min(torch.finfo(torch.float16).tiny)
    numbers = (groups / wide[..., None]).round().clamp(-127, 127).to(torch.int8)
    return _flat(numbers, weight).numpy(), scales.numpy()


def round_int4(weight: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Return the numbers 0 to 15, indices into `CODEBOOK`, and the scales (outputs, groups) of float32 weights."""
    groups = _groups(weight)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    scales, most = largest.new_zeros(largest.shape), largest.new_full(largest.shape, -1.0)
    for start in _STARTS:
        best, gained = _best_scales(groups, largest * start)
        scales = torch.where(gained > most, best, scales)
        most = torch.maximum(most, gained)
    refined, gained = _best_scales(groups, scales)
    scales = torch.where(gained >= most, refined, scales).half()
    return _flat(_nearest(groups, scales).to(torch.uint8), weight).numpy(), scales.numpy()


def _best_scales(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales with the least squared error for the codes under `scales`, and the reduction of the error."""
    values = torch.from_numpy(CODEBOOK).take(_nearest(groups, scales))
    product, square = (values * groups).sum(2), (values * values).sum(2)
    return product / square, product * product / square


def _nearest(groups: Tensor, scales: Tensor) -> Tensor:
    wide = scales.float()[..., None]
    steps = (torch.where(wide == 0, 0, groups / wide) + 1) * _STEPS
    return _NEAREST.take(steps.clamp_(0, 2 * _STEPS - 1).long())


def _groups(weight: Tensor) -> Tensor:
    """Return (outputs, inputs) as (outputs, groups, 32), padded with zeros after the last input."""
    return nn.functional.pad(weight, (0, -weight.shape[1] % GROUP_INPUTS)).unflatten(1, (-1, GROUP_INPUTS))


def _flat(numbers: Tensor, weight: Tensor) -> Tensor:
    return numbers.flatten(1)[:, : weight.shape[1]].contiguous()


def dequantise(weight: Tensor, bits: Bits) -> Tensor:
    """Return the values of a weight after rounding, float32 (outputs, inputs)."""
    if bits == 16:
        return weight.to(torch.bfloat16).float()
    numbers, scales = round_int8(weight.float()) if bits == 8 else round_int4(weight.float())
    wide = torch.from_numpy(scales).float().repeat_interleave(GROUP_INPUTS, 1)[:, : weight.shape[1]]
    values = (
        torch.from_numpy(numbers).float() if bits == 8 else torch.from_numpy(CODEBOOK)[torch.from_numpy(numbers).long()]
    )
    return values * wide


class PackedLinear(nn.Module):
    """A linear layer over packed weights; it replaces `nn.Linear`, with the same result except for rounding.

    Its input is (..., inputs) float32 or bfloat16, and so is its output (..., outputs). Not for two threads at once.
    """

    weight = None
    """transformers' T5 asks for the format of a layer's weight, if that is a tensor."""

    def __init__(self, quantised: Quantised, bias: Tensor | None, num_threads: int) -> None:
        super().__init__()
        self.out_features, self.in_features = quantised.shape
        self.packed = quantised.packed
        self._bias = None if bias is None else session.tensor("packed bias", lambda: bias.detach().float().contiguous())
        self.matrix = Matrix(
            weights=self.packed.ctypes.data, codebook=_CODES.ctypes.data,
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=self.in_features, outputs=self.out_features, format=_FORMATS[quantised.bits],
        )  # fmt: skip
        """The layer in the kernels' form; its addresses are valid as long as this layer exists."""
        self._call = LinearCall(matrix=self.matrix, num_threads=num_threads)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.packed.nbytes

    def forward(self, states: Tensor) -> Tensor:
        """Return the layer's output."""
        rows = states.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = rows.new_empty(rows.shape[0], self.out_features)
        if rows.shape[0]:
            call = self._call
            scratch = _scratch(scratch_bytes(rows.shape[0], self.in_features, call.num_threads))
            call.input, call.output, call.scratch = rows.data_ptr(), out.data_ptr(), scratch
            call.input_stride, call.output_stride = rows.stride(0), self.out_features
            call.rows, call.is_bf16 = rows.shape[0], rows.dtype == torch.bfloat16
            run_linear(call)
        return out.view(*states.shape[:-1], self.out_features)

    __call__ = forward  # no hooks: in a step of one token they would take a tenth of the time


def _scratch(nbytes: int) -> int:
    """Return the address of at least nbytes bytes, 64-byte aligned; valid in this thread until its next call."""
    found: tuple[NDArray[np.uint8], int] | None = getattr(_local, "scratch", None)
    if found is None or found[0].nbytes < nbytes:
        buffer = empty_aligned(nbytes)
        found = _local.scratch = buffer, buffer.ctypes.data
    return found[1]


def pack_linears(model: nn.Module, bits: Bits, dtype: torch.dtype, head: nn.Module | None = None) -> int:
    """Pack the linear layers of a model on the CPU, in place; return the bytes of all of them.

    dtype is the model's compute format, float32 or bfloat16. Without a kernel, a layer keeps its rounded weights in
    dtype, for torch. Tied weights are packed for the head, and stay unpacked for the embedding. head is the layer that
    computes the logits: it has at least eight bits, since its rounding error affects every logit directly.
    """
    compiled = can_multiply(is_bf16=dtype == torch.bfloat16)
    nbytes = 0
    # Without the layers themselves, whose weights should go as soon as they are packed.
    for parent in [module for module in model.modules() if any(module.children())]:
        if isinstance(parent, SharedLinear):
            parent.join()
        for name, child in list(parent.named_children()):
            weight = _weight_of(child)
            if weight is None:
                continue
            bias: Tensor | None = getattr(child, "bias", None)
            own_bits = 8 if child is head and bits == _LEAST_BITS else bits
            if compiled:
                layer: nn.Module = PackedLinear(Quantised(weight, own_bits), bias, torch.get_num_threads())
                nbytes += layer.nbytes
            else:
                layer = _rounded(weight, bias, own_bits, dtype)
                nbytes += weight.numel() * dtype.itemsize
            setattr(parent, name, layer)
    return nbytes


def _weight_of(layer: Any) -> Tensor | None:
    """Return the weight (outputs, inputs) of a linear layer, or of GPT-2's transposed one; None for other layers."""
    if type(layer) is nn.Linear:
        return layer.weight.detach()
    if type(layer).__name__ == "Conv1D" and getattr(layer, "weight", None) is not None:
        return layer.weight.detach().T.contiguous()
    return None


def _rounded(weight: Tensor, bias: Tensor | None, bits: Bits, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    values = weight if session.is_skeleton() else dequantise(weight, bits)
    layer.weight = nn.Parameter(values.to(dtype), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return layer
