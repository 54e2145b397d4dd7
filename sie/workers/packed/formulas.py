"""Recognises what a module computes by its values, not by its name: activations, norms, and the embeddings' factor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sie.native.encoder import ACTIVATIONS

_SAMPLE = torch.linspace(-12, 12, 193)  # beyond 6, where ReLU6 is cut
_FORMULAS = {"gelu": functional.gelu, "gelu_new": lambda x: functional.gelu(x, approximate="tanh"), "relu": functional.relu,
             "silu": functional.silu}  # fmt: skip
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative to a value: in bfloat16 the library rounds twice by 1/256."""


class UnknownPartsError(Exception):
    """A model is not of a kind that the compiled library runs; the text names the difference."""


def activation_of(functions: Iterable[Any]) -> int:
    """Return the number (`sie.native.encoder.ACTIVATIONS`) of the one activation that all these modules compute.

    Raises UnknownPartsError if they differ, or compute another one.
    """
    found: set[str | None] = set()
    for function in functions:
        values = function(_SAMPLE) if isinstance(function, nn.Module) else None
        found.add(next((name for name, formula in _FORMULAS.items() if _is_close(values, formula(_SAMPLE))), None))
    name = found.pop() if len(found) == 1 else None
    if name is None:
        raise UnknownPartsError("an unsupported activation")
    return ACTIVATIONS[name]


def _is_close(values: Tensor | None, expected: Tensor) -> bool:
    return values is not None and values.shape == expected.shape and torch.allclose(values, expected, atol=1e-5)


def norm_factors(norm: Any) -> list[tuple[Tensor, float]]:
    """Return a library norm's possible factors, (width,) float32, each with its epsilon; empty for another module."""
    weight: nn.Parameter | None = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or weight.dim() != 1 or not isinstance(epsilon, float) or len(list(norm.parameters())) != 1:
        return []
    return [(factors.detach(), epsilon) for factors in (weight.float(), 1.0 + weight.float())]  # Llama's, Gemma's


def root_mean_square_of(norm: Any) -> tuple[Tensor, float] | None:
    """Return the factors (width,) float32 and the epsilon of a module that is a root mean square norm, else None."""
    if not type(norm).__name__.endswith("RMSNorm"):
        return None
    for factors, epsilon in norm_factors(norm):
        dtype = norm.weight.dtype
        states = torch.randn(4, len(factors), generator=torch.Generator().manual_seed(0)).to(dtype) * 3
        expected, wide = norm(states), states.float()
        found = wide * (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt() * factors
        far = (found - expected.float()).abs()
        if dtype in _TOLERANCE and bool((far <= _TOLERANCE[dtype] * expected.float().abs() + 1e-6).all()):
            return factors, epsilon
    return None


def embedding_scale(config: Any, table: Tensor, first: Tensor | None) -> float:
    """Return the factor of the embeddings: the configured factor that a forward pass confirms.

    table (t, d) holds the embeddings of some tokens, first (1, t, d) the first layer's input for them. Raises
    UnknownPartsError if that is anything else.
    """
    if first is None or first.shape[1:] != table.shape:
        raise UnknownPartsError("the first layer's input does not have the embeddings' shape")
    table, first = table.float(), first[0].float()
    shown = float((first * table).sum() / table.square().sum().clamp_min(1e-30))
    known = (1.0, table.shape[1] ** 0.5, float(getattr(config, "embedding_multiplier", None) or 1.0))
    scale = min(known, key=lambda factor: abs(factor - shown))
    if float((first - scale * table).norm()) > 0.02 * float(first.norm()):
        raise UnknownPartsError("the first layer's input is not the embeddings times a known factor")
    return scale
