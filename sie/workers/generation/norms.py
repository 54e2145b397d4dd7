"""The root mean square norms of a generating model on a CPU: one compiled call instead of eight library calls.

A model has several in each layer, and for a prompt they take as long as its products. No family is known by name: a
module named as an RMS norm is replaced if its results match one of two formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sie.native.norm import NormCall, can_normalise, run_norm
from sie.workers.packed.formulas import norm_factors

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative to a value: in bfloat16 the library rounds twice by 1/256, the compiled norm once."""


class CompiledNorm(nn.Module):
    """Divides each row by the root of its mean square, times a weight; input (..., width), rows contiguous."""

    def __init__(self, original: nn.Parameter, weight: Tensor, epsilon: float) -> None:
        """Take the weight (width,), float32, and the original parameter, for a model that reads it."""
        super().__init__()
        self.weight = original
        self._weight = weight.detach().contiguous()  # never converted with the model: its address is read only once
        self._call = NormCall(weight=self._weight.data_ptr(), width=len(weight), epsilon=epsilon)

    @property
    def factors(self) -> Tensor:
        """The factor of each value, (width,) float32; its address does not change."""
        return self._weight

    @property
    def epsilon(self) -> float:
        """The number added to the mean of squares."""
        return self._call.epsilon

    def forward(self, states: Tensor) -> Tensor:
        """Return the normalised states, in the format of the input."""
        call = self._call
        if states.is_contiguous():
            out = torch.empty_like(states)
            call.inner = states.numel() // call.width
            call.input_inner = call.output_inner = call.width
            call.outer = 1
        elif states.dim() == 4 and states.stride(3) == 1 and states.shape[0] == 1:  # heads before tokens
            out = torch.empty_like(states)
            call.outer, call.inner = states.shape[1], states.shape[2]
            call.input_outer, call.input_inner = states.stride(1), states.stride(2)
            call.output_outer, call.output_inner = out.stride(1), out.stride(2)
        else:
            return self.forward(states.contiguous())
        call.input, call.output = states.data_ptr(), out.data_ptr()
        call.is_bf16 = states.dtype == torch.bfloat16
        run_norm(call)
        return out

    __call__ = forward  # no hooks, which take longer than the norm


def compile_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace a model's norms on the CPU with compiled ones; return how many. dtype is the model's compute format."""
    if dtype not in _TOLERANCE or not can_normalise(is_bf16=dtype == torch.bfloat16):
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            found = _compiled(child, dtype) if type(child).__name__.endswith("RMSNorm") else None
            if found is not None:
                setattr(parent, name, found)
                count += 1
    return count


def _compiled(norm: Any, dtype: torch.dtype) -> CompiledNorm | None:
    """Return a compiled norm with the same results as a library norm, or None if no formula matches."""
    for factors, epsilon in norm_factors(norm):
        states = torch.randn(4, len(factors), generator=torch.Generator().manual_seed(0)).to(dtype) * 3
        expected = norm(states)
        if expected.dtype != dtype:
            return None
        compiled = CompiledNorm(norm.weight, factors, epsilon)
        far = (compiled(states).float() - expected.float()).abs()
        if bool((far <= _TOLERANCE[dtype] * expected.float().abs() + 1e-6).all()):
            return compiled
    return None
