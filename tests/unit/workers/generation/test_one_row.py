"""The product of one row: the faster of two implementations, if both compute the same."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import sie.workers.generation
from sie.workers.generation import one_row
from sie.workers.generation.one_row import choose_products
from tests.triton_interpreter import IS_INTERPRETED, interpreted, needs_triton, run_interpreted

needs_gpu = pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def kernel(monkeypatch):
    """Return what counts the calls of a stand-in for the kernel; `wrong` is added to what it gives."""
    stand_in = SimpleNamespace(calls=0, wrong=0.0)

    def multiply_row(states, weight, bias):
        assert states.numel() == weight.shape[1]
        stand_in.calls += 1
        return linear(states, weight, bias) + stand_in.wrong

    stand_in.multiply_row = multiply_row
    monkeypatch.setitem(sys.modules, "sie.workers.generation.layer_kernels", stand_in)
    monkeypatch.setattr(sie.workers.generation, "layer_kernels", stand_in, raising=False)
    return stand_in


def measure(multiply, states, layers):
    """Say that the kernel is the faster one for the wide layers."""
    return 1.0 if (multiply is linear) != (layers[0].out_features == 12) else 2.0


def test_the_faster_one_multiplies_one_row_and_the_library_more(kernel):
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 12, bias=False))
    assert choose_products(model, lambda *_: 1.0) == 0
    assert choose_products(model, measure) == 2
    kernel.calls = 0
    states = torch.randn(2, 8)
    both = linear(states, model[0].weight, model[0].bias)
    assert torch.allclose(model[0](states), both)
    assert kernel.calls == 0
    assert torch.allclose(model[0](states[1:]), both[1:], atol=1e-6)
    model[2](states[:1])
    assert kernel.calls == 2
    model[1](torch.randn(1, 12))
    assert kernel.calls == 2


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("cache_bytes", "num_timed"), [(0, 3), (300, 3), (4000, 32)])
def test_more_weights_are_timed_than_the_device_s_cache_holds(cache_bytes, num_timed, monkeypatch):
    """Copies of few small weights, because between two steps of a model its other weights drive these from the cache."""
    monkeypatch.setattr(one_row, "_cache_bytes", lambda _device: cache_bytes)
    model = nn.Sequential(*(nn.Linear(8, 12) for _ in range(3)))
    seen = []
    choose_products(model, lambda _multiply, _states, layers: float(seen.append(list(layers)) or 1))
    for layers in seen:
        addresses = {layer.weight.data_ptr() for layer in layers}
        assert len(addresses) == len(layers) == num_timed
        assert all(torch.equal(layer.weight, model[i % 3].weight) for i, layer in enumerate(layers))


def test_a_kernel_that_computes_otherwise_or_fails_is_not_chosen(kernel):
    model = nn.Sequential(nn.Linear(8, 12))
    kernel.wrong = 1.0
    assert choose_products(model, measure) == 0
    del kernel.multiply_row
    assert choose_products(model, measure) == 0


def test_a_model_on_a_cpu_is_not_measured():
    assert choose_products(nn.Sequential(nn.Linear(8, 12))) == 0


@needs_triton
def test_the_kernel_computes_on_a_cpu_what_it_is_to():
    run_interpreted(__file__)


def check(device, dtype, tolerance):
    from sie.workers.generation.layer_kernels import multiply_row

    generator = torch.Generator().manual_seed(1)
    for outputs, inputs, has_bias in ((6, 40, True), (9, 1500, False)):
        states, weight, bias = (
            torch.randn(*shape, generator=generator).to(device, dtype)
            for shape in ((1, 1, inputs), (outputs, inputs), (outputs,))
        )
        expected = linear(states.float(), weight.float(), bias.float() if has_bias else None)
        found = multiply_row(states, weight, bias if has_bias else None)
        assert found.shape == (1, 1, outputs)
        assert float((found.float() - expected).abs().max()) < tolerance * float(expected.abs().max())


@interpreted
def test_the_kernel_computes_what_the_library_does():
    check("cpu", torch.float32, 1e-5)
    check("cpu", torch.float16, 2e-3)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_kernel_computes_what_the_library_does_and_is_measured():
    check("cuda", torch.bfloat16, 2e-2)
    model = nn.Sequential(*(nn.Linear(1024, 4096, bias=False) for _ in range(4))).to("cuda", torch.bfloat16)
    assert choose_products(model) in (0, 4)
