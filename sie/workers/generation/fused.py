"""Replaces layers of a model on a GPU with one kernel each, instead of the library's many launches.

No family is known by name. A norm, an attention layer's rotation, a gated layer, and a linear layer with what is behind
it (a GELU, or a sum and a layer norm) are replaced if they give the same results as the kernel on random numbers. Other
layers stay as they are.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sie.runtime.logs import get_logger
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import raise_if_lost
from sie.workers.generation.kernel_check import describe, is_of_compiler, why_no_kernels
from sie.workers.packed.formulas import norm_factors

_log = get_logger(__name__)
_ROTATE = "apply_rotary_pos_emb"
"""The rotation's name in every transformers family; `unsqueeze_dim` 1 means heads before tokens."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference, relative to the largest value: the library rounds after each of its operations."""
_NUM_TOKENS = 3
_FORMULAS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "tanh gelu": partial(functional.gelu, approximate="tanh"),
}

Rotate = Callable[..., tuple[Tensor, Tensor]]


class KernelError(Exception):
    """A kernel cannot be built or launched."""


def fuse_layers(model: nn.Module) -> int:
    """Replace the layers of a 16-bit model on a GPU that a kernel can compute; return how many were replaced.

    If kernels do not run here, the model stays as it is, and the fallback is noted. Raises DeviceLostError.
    """
    weight = next(model.parameters())
    if weight.device.type != "cuda" or not _has_layers(model):
        return 0
    why = "kernels need 16 bits" if weight.dtype == torch.float32 else why_no_kernels(weight.device)
    if why:
        note("no_kernels", why)
        return 0
    return fuse_all(model)


def fuse_all(model: nn.Module) -> int:
    """Replace layers as `fuse_layers`, for any device. Stops at the first kernel that cannot be built."""
    count = 0
    try:
        with torch.no_grad():
            for fuse in (fuse_norms, fuse_rotations, fuse_gates, fuse_activations, fuse_sums):
                count += fuse(model)
    except KernelError as error:
        note("no_kernels", str(error))
    return count


def _has_layers(model: nn.Module) -> bool:
    """Return whether a model has a layer that a kernel might compute."""
    tests = (_is_norm, _turns, _is_gated, _activated_parts, _summed_parts)
    return any(test(module) for module in model.modules() for test in tests)


def fuse_norms(model: nn.Module) -> int:
    """Replace root mean square norms."""
    count = 0
    for norm in filter(_is_norm, model.modules()):
        for factors, epsilon in norm_factors(norm):
            fused = partial(_normalise, factors, epsilon)
            if _is_same(norm, fused, _random(norm, _NUM_TOKENS, len(factors))):
                norm.forward = fused
                count += 1
                break
    return count


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _normalise(factors: Tensor, epsilon: float, states: Tensor) -> Tensor:
    from sie.workers.generation import layer_kernels

    return layer_kernels.normalise(states, factors, epsilon)


def fuse_rotations(model: nn.Module) -> int:
    """Make each layer that calls the library's rotation call the kernel instead; other models are not affected."""
    count = 0
    fused: dict[Any, types.FunctionType | None] = {}
    for module in model.modules():
        if _turns(module):
            forward: Any = type(module).forward
            if forward not in fused:
                fused[forward] = _with_rotation(forward, module)
            own = fused[forward]
            if own is not None:
                module.forward = types.MethodType(own, module)
                count += 1
    return count


def _turns(module: nn.Module) -> bool:
    """Return whether a layer calls the library's rotation."""
    forward = type(module).forward
    return isinstance(forward, types.FunctionType) and _ROTATE in forward.__code__.co_names


def _with_rotation(forward: types.FunctionType, module: nn.Module) -> types.FunctionType | None:
    """Return a layer's forward function with the kernel under the rotation's name, or None if results differ."""
    original: Rotate | None = forward.__globals__.get(_ROTATE)
    if original is None:
        return None
    query, key, angles = (_random(module, heads, _NUM_TOKENS, 16)[None] for heads in (4, 2, 1))
    angles = torch.cat((angles[0, :, :, :8],) * 2, -1)
    turn = (query, key, angles.cos(), angles.sin())
    rotate = partial(_rotate, original)
    if not _is_same(original, rotate, *turn):
        return None
    names = {**forward.__globals__, _ROTATE: rotate}
    own = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    return own


def _rotate(original: Rotate, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **named: Any) -> Any:
    from sie.workers.generation import layer_kernels

    is_plain = not rest and not named and query.dim() == 4 and cos.dim() == 3  # one row: (1, h, t, d)
    if not is_plain or query.shape[0] != 1 or cos.shape[0] != 1 or cos.shape[2] != query.shape[3]:
        return original(query, key, cos, sin, *rest, **named)
    return layer_kernels.rotate(query, key, cos, sin)


def fuse_gates(model: nn.Module) -> int:
    """Replace the middle of gated layers, `down(act(gate(x)) * up(x))`."""
    count = 0
    for module in filter(_is_gated, model.modules()):
        gate, *_, activation = _gated_parts(module)
        is_silu = {"silu": True, "tanh gelu": False}.get(_formula(activation))
        if is_silu is None:
            continue
        fused = partial(_run_gated, module, is_silu)
        if _is_same(module, fused, _random(module, 1, _NUM_TOKENS, gate.in_features)):
            module.forward = fused
            count += 1
    return count


def _gated_parts(module: nn.Module) -> list[Any]:
    return [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]


def _is_gated(module: nn.Module) -> bool:
    parts = _gated_parts(module)
    return all(isinstance(part, nn.Module) for part in parts) and hasattr(parts[0], "in_features")


def _formula(activation: nn.Module) -> str:
    """Return the name of an activation in `_FORMULAS`, by its values; an empty text for any other layer."""
    numbers = torch.linspace(-6, 6, 200)
    try:
        found = activation(numbers)
        return next((name for name, own in _FORMULAS.items() if torch.allclose(found, own(numbers), 0, 1e-5)), "")
    except Exception:  # a layer that is no activation may raise anything
        return ""


def _run_gated(module: Any, is_silu: bool, states: Tensor) -> Tensor:
    """Run a gated layer with the linear layers that it has now: an adapter replaces them."""
    from sie.workers.generation import layer_kernels

    gates = module.gate_proj(states)
    return module.down_proj(layer_kernels.gate(gates, module.up_proj(states), is_silu=is_silu))


def fuse_activations(model: nn.Module) -> int:
    """Replace linear layers with a GELU behind them, `act(linear(x))`."""
    count = 0
    for module in model.modules():
        if (parts := _activated_parts(module)) is not None:
            width = getattr(module, parts[0]).in_features
            count += _replace(module, partial(_run_activated, module, *parts), _random(module, 1, _NUM_TOKENS, width))
    return count


def _replace(module: nn.Module, fused: Callable[..., Tensor], *states: Tensor) -> bool:
    """Let a module run the kernel if it gives the same results; tell whether it does.

    A call in another form, with keywords or more arguments, still runs the module's own function.
    """
    own = module.forward
    if not _is_same(module, fused, *states):
        return False

    def forward(*given: Any, **named: Any) -> Any:
        return own(*given, **named) if named or len(given) != len(states) else fused(*given)

    module.forward = forward
    return True


def _activated_parts(module: nn.Module) -> tuple[str, bool] | None:
    """Return the name of a linear layer and whether its GELU is exact, if a module has these two layers alone."""
    found = _linear_and_other(module)
    if found is None:
        return None
    formula = _formula(getattr(module, found[1]))
    return (found[0], formula == "gelu") if "gelu" in formula else None


def _linear_and_other(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of a linear and of another layer, if a module has just these, apart from dropout."""
    children = {name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    linears = [name for name, child in children.items() if type(child) is nn.Linear]
    others = [name for name in children if name not in linears]
    return (linears[0], others[0]) if len(linears) == len(others) == 1 else None


def _run_activated(module: nn.Module, linear: str, is_exact: bool, states: Tensor) -> Tensor:
    from sie.workers.generation import layer_kernels

    return layer_kernels.activate(*_product(getattr(module, linear), states), is_exact=is_exact)


def _product(linear: nn.Module, states: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a linear layer's outputs without its bias, and the bias; None for a layer with adapters, which adds its own."""
    if type(linear) is not nn.Linear:
        return linear(states), None
    return functional.linear(states, linear.weight), linear.bias


def fuse_sums(model: nn.Module) -> int:
    """Replace linear layers with a sum and a layer norm behind them, `norm(linear(x) + y)`."""
    count = 0
    for module in model.modules():
        if (parts := _summed_parts(module)) is not None:
            linear = getattr(module, parts[0])
            states, flipped = (_random(module, 1, _NUM_TOKENS, n) for n in (linear.in_features, linear.out_features))
            count += _replace(module, partial(_run_summed, module, *parts), states, flipped.flip(1))
    return count


def _summed_parts(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of a linear layer and of the layer norm of its outputs, if a module has these two layers alone."""
    found = _linear_and_other(module)
    if found is None:
        return None
    linear, norm = (getattr(module, name) for name in found)
    is_norm = isinstance(norm, nn.LayerNorm) and norm.bias is not None
    return found if is_norm and norm.normalized_shape == (linear.out_features,) else None


def _run_summed(module: nn.Module, linear: str, norm: str, states: Tensor, residual: Tensor) -> Tensor:
    from sie.workers.generation import layer_kernels

    behind: Any = getattr(module, norm)
    product = _product(getattr(module, linear), states)
    return layer_kernels.add_and_normalise(*product, residual, behind.weight, behind.bias, behind.eps)


def _random(module: nn.Module, *shape: int) -> Tensor:
    """Return the same numbers every time, in the module's format and on its device."""
    weight = next(module.parameters())
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 2
    return numbers.to(weight.device, weight.dtype)


def _is_same(original: Callable[..., Any], fused: Callable[..., Any], *states: Tensor) -> bool:
    """Tell whether both return the same tensors except for rounding; False if either raises.

    Raises KernelError if the kernel cannot be built, DeviceLostError if the device is lost.
    """
    try:
        expected, found = (
            value if isinstance(value, tuple) else (value,) for value in (original(*states), fused(*states))
        )
    except Exception as error:  # an unknown architecture or a compiler may raise anything
        raise_if_lost(error)
        if is_of_compiler(error):
            raise KernelError(describe(error)) from error
        _log.info("a layer keeps the library's implementation: %s: %s", type(error).__name__, error)
        return False
    return len(expected) == len(found) and all(map(_is_close, expected, found))


def _is_close(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    far = (expected.float() - found.float()).abs().max()
    return bool(far <= _TOLERANCE[expected.dtype] * expected.float().abs().max())
