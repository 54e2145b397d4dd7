"""Chooses at load the faster product with one row on a GPU, the library's or a kernel's, for each shape by measurement.

A single stream decodes as fast as its weights are read. How close the library comes to that speed depends on the shape,
the device and the library's version. So both are timed in a CUDA graph, as they will run, over more weights than a
cache can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sie.runtime.logs import get_logger
from sie.workers.device.capture import Capturer
from sie.workers.device.faults import raise_if_lost
from sie.workers.generation.kernel_check import why_no_kernels

_log = get_logger(__name__)
_TOLERANCE = 2e-2
"""Largest difference, relative to the largest output: 16-bit rounding, and sums in another order."""
_MOST_LAYERS = 24
_CACHES = 3
"""The least bytes of weights that are timed, in caches of the device."""
_REPEATS = 5
_LEAST_GAIN = 0.97
"""Share of the library's time; a smaller gain is noise."""

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Takes states (1, 1, k), a weight (n, k) and a bias (n,); returns (1, 1, n)."""
Measure = Callable[[Multiply, Tensor, Sequence[nn.Linear]], float]
"""Returns the time of a product over layers of one shape."""


class _Shape(NamedTuple):
    outputs: int
    inputs: int
    has_bias: bool


def choose_products(model: nn.Module, measure: Measure | None = None) -> int:
    """Make a 16-bit model's linear layers on a GPU multiply one row by the faster product; return how many changed.

    After any failure a layer keeps the library's product. Raises DeviceLostError.
    """
    by_shape: dict[_Shape, list[nn.Linear]] = {}
    for layer in model.modules():
        if type(layer) is nn.Linear and _is_for_kernel(layer.weight, measure):
            shape = _Shape(layer.out_features, layer.in_features, layer.bias is not None)
            by_shape.setdefault(shape, []).append(layer)
    count = 0
    for shape, layers in by_shape.items():
        try:
            with torch.inference_mode():
                is_faster = _is_faster(layers, measure or measure_captured)
        except Exception as error:  # a compiler or the device's library may raise anything
            raise_if_lost(error)
            _log.info("products with one row keep the library's implementation: %s: %s", type(error).__name__, error)
            return count
        if is_faster:
            _log.info("layers of %d by %d: the kernel multiplies one row", shape.outputs, shape.inputs)
            for layer in layers:
                setattr(layer, "forward", partial(_multiply, layer))  # noqa: B010  # its parameter has a name of its own
            count += len(layers)
    return count


def _is_for_kernel(weight: Tensor, measure: Measure | None) -> bool:
    if not weight.is_contiguous():
        return False
    is_half = weight.device.type == "cuda" and weight.dtype in (torch.float16, torch.bfloat16)
    return measure is not None or (is_half and not why_no_kernels(weight.device))


def _is_faster(layers: Sequence[nn.Linear], measure: Measure) -> bool:
    from sie.workers.generation.layer_kernels import multiply_row

    weight = layers[0].weight
    numbers = torch.randn(1, 1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    states = numbers.to(weight.device, weight.dtype)
    expected = linear(states, weight, layers[0].bias).float()
    far = (multiply_row(states, weight, layers[0].bias).float() - expected).abs().max()
    if not bool(far <= _TOLERANCE * expected.abs().max()):
        return False
    timed = _beyond_cache(layers)
    return measure(multiply_row, states, timed) < _LEAST_GAIN * measure(linear, states, timed)


def _beyond_cache(layers: Sequence[nn.Linear]) -> list[nn.Linear]:
    """Return layers to time. Copies join them if the weights of all layers of this shape would fit into a few caches."""
    weight = layers[0].weight
    count = -(-_CACHES * _cache_bytes(weight.device) // weight.nbytes)
    own = layers[: max(_MOST_LAYERS, count)]
    return [*own, *(deepcopy(layer) for layer in islice(cycle(own), max(0, count - len(own))))]


def _cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0


def _multiply(layer: nn.Linear, states: Tensor) -> Tensor:
    if states.numel() != layer.in_features:
        return linear(states, layer.weight, layer.bias)
    from sie.workers.generation.layer_kernels import multiply_row

    return multiply_row(states, layer.weight, layer.bias)


def measure_captured(multiply: Multiply, states: Tensor, layers: Sequence[nn.Linear]) -> float:
    """Return the least milliseconds of a CUDA graph that holds one product with each layer."""

    def run() -> None:
        for layer in layers:
            multiply(states, layer.weight, layer.bias)

    graph, _ = Capturer(states.device).capture(run)
    best = float("inf")
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best
