"""Layers that one kernel computes: which layers are replaced, with stand-ins on a CPU, and the kernels' results."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn import functional

import sie.workers.generation
from sie.workers.device.fallbacks import collecting
from sie.workers.generation import kernel_check
from sie.workers.generation.fused import fuse_all, fuse_gates, fuse_layers, fuse_norms, fuse_rotations
from tests.generation_models import FAMILIES
from tests.triton_interpreter import IS_INTERPRETED, interpreted, needs_triton, run_interpreted

ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}
needs_gpu = pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")


def normalise(states, factors, epsilon):
    values = states.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon) * factors).to(states.dtype)


def rotate(query, key, cos, sin):
    turned = []
    for states in (query, key):
        first, second = states.float().chunk(2, -1)
        turned.append((states.float() * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(states.dtype))
    return tuple(turned)


def gate(gates, states, *, is_silu):
    opened = functional.silu(gates.float()) if is_silu else functional.gelu(gates.float(), approximate="tanh")
    return (opened * states.float()).to(states.dtype)


def activate(states, bias, *, is_exact):
    values = states.float() if bias is None else states.float() + bias.float()
    return functional.gelu(values, approximate="none" if is_exact else "tanh").to(states.dtype)


def add_and_normalise(states, bias, residual, weight, shift, epsilon):
    values = states.float() + residual.float() + (0 if bias is None else bias.float())
    return functional.layer_norm(values, weight.shape, weight.float(), shift.float(), epsilon).to(states.dtype)


def build_model(name):
    config_class, values = FAMILIES[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**values)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    return model


@pytest.mark.parametrize(
    ("name", "norms", "rotations", "gates"),
    [
        ("llama", 7, 3, 3),
        ("qwen3", 13, 3, 3),  # queries and keys are normalised, too
        ("gemma3", 43, 7, 7),  # factors are 1 and a weight; GELU
        ("phi", 0, 3, 0),
        ("glm4", 13, 0, 0),  # pairs are neighbours; gate and rest are one layer
        ("gpt2", 0, 0, 0),
    ],
)
def test_what_computes_the_same_is_replaced_and_the_logits_stay(name, norms, rotations, gates, monkeypatch):
    stand_in = SimpleNamespace(normalise=normalise, rotate=rotate, gate=gate)
    monkeypatch.setitem(sys.modules, "sie.workers.generation.layer_kernels", stand_in)
    monkeypatch.setattr(sie.workers.generation, "layer_kernels", stand_in, raising=False)
    model = build_model(name)
    token_ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(token_ids, use_cache=False).logits
        assert (fuse_norms(model), fuse_rotations(model), fuse_gates(model)) == (norms, rotations, gates)
        assert torch.allclose(model(token_ids, use_cache=False).logits, expected, atol=1e-4)
        assert torch.allclose(
            build_model(name)(token_ids, use_cache=False).logits, expected, atol=1e-5
        )  # other models' are theirs


def test_a_model_on_a_cpu_stays_as_it_is():
    assert fuse_layers(build_model("llama")) == 0


def test_a_kernel_that_does_not_run_replaces_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sie.workers.generation.layer_kernels", SimpleNamespace())
    monkeypatch.setattr(sie.workers.generation, "layer_kernels", SimpleNamespace(), raising=False)
    model = build_model("llama")
    with torch.no_grad():
        assert fuse_norms(model) + fuse_rotations(model) + fuse_gates(model) == 0


def test_the_first_kernel_that_cannot_be_built_ends_the_attempts_and_is_reported(monkeypatch):
    calls = []

    def build(*_arguments, **_named):
        calls.append(1)
        raise subprocess.CalledProcessError(1, ["gcc", "main.c"])

    stand_in = SimpleNamespace(normalise=build, rotate=build, gate=build)
    monkeypatch.setitem(sys.modules, "sie.workers.generation.layer_kernels", stand_in)
    monkeypatch.setattr(sie.workers.generation, "layer_kernels", stand_in, raising=False)
    with collecting("m") as fallbacks:
        assert fuse_all(build_model("llama")) == 0
    assert len(calls) == 1
    (fallback,) = fallbacks.found
    assert fallback.name == "no_kernels"
    assert "'gcc', 'main.c'" in fallback.reason


@pytest.fixture
def fresh_check():
    kernel_check.why_no_kernels.cache_clear()
    yield
    kernel_check.why_no_kernels.cache_clear()


@pytest.mark.usefixtures("fresh_check")
def test_whether_kernels_run_is_tried_once_for_a_device_and_names_what_is_missing(monkeypatch):
    tried = []

    def normalise(states, _factors, _epsilon):
        tried.append(states.device)
        raise RuntimeError("Failed to find C compiler")

    stand_in = SimpleNamespace(normalise=normalise)
    monkeypatch.setitem(sys.modules, "sie.workers.generation.layer_kernels", stand_in)
    monkeypatch.setattr(sie.workers.generation, "layer_kernels", stand_in, raising=False)
    monkeypatch.setattr(kernel_check, "find_spec", lambda _name: object())
    monkeypatch.setattr(kernel_check.shutil, "which", lambda _name: None)
    found = {kernel_check.why_no_kernels(torch.device("cpu")) for _ in range(3)}
    assert found == {"there is no C compiler: install gcc"}
    assert len(tried) == 1
    monkeypatch.setattr(kernel_check.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(kernel_check.sysconfig, "get_paths", lambda: {"include": "/nowhere/python3.11"})
    reason = kernel_check.why_no_kernels(torch.device("cpu", 0))
    assert reason == "/nowhere/python3.11/Python.h is missing: install the headers of this Python (python3-dev)"


@pytest.mark.usefixtures("fresh_check")
def test_kernels_that_run_have_nothing_missing(monkeypatch):
    stand_in = SimpleNamespace(normalise=normalise)
    monkeypatch.setitem(sys.modules, "sie.workers.generation.layer_kernels", stand_in)
    monkeypatch.setattr(sie.workers.generation, "layer_kernels", stand_in, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(kernel_check, "find_spec", lambda _name: object())
    assert kernel_check.why_no_kernels(torch.device("cpu")) == ""


@needs_triton
def test_the_kernels_compute_on_a_cpu_what_they_are_to():
    run_interpreted(__file__)


def check_kernels(device, dtype, tolerance):
    from sie.workers.generation import layer_kernels

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    generator = torch.Generator().manual_seed(1)
    joined = random(1, 5, 200)  # what a joined layer gives: its parts are views
    heads = joined[..., 40:160].view(1, 5, 3, 40)
    factors = random(40).float()
    pairs = [(layer_kernels.normalise(states, factors, 1e-5), normalise(states, factors, 1e-5))
             for states in (heads, heads.transpose(1, 2), random(7, 40), random(1, 1, 40))]  # fmt: skip
    angles = random(1, 5, 40).float()
    turn = heads.transpose(1, 2), joined[..., :40].view(1, 5, 1, 40).transpose(1, 2), angles.cos(), angles.sin()
    pairs += zip(layer_kernels.rotate(*turn), rotate(*turn), strict=True)
    parts = joined[..., :100], joined[..., 100:]
    pairs += [(layer_kernels.gate(*parts, is_silu=is_silu), gate(*parts, is_silu=is_silu)) for is_silu in (True, False)]
    for found, expected in pairs:
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert float((found.float() - expected.float()).abs().max()) < tolerance


@interpreted
def test_the_kernels_compute_what_the_library_does():
    check_kernels("cpu", torch.float32, 1e-5)
    check_kernels("cpu", torch.float16, 1e-2)


def check_kernels_of_encoders(device, dtype, num_rows, width):
    from sie.workers.generation import layer_kernels

    generator = torch.Generator().manual_seed(num_rows)
    states, residual = ((torch.randn(1, num_rows, width, generator=generator) * 3).to(device, dtype) for _ in range(2))
    bias, weight, shift = (torch.randn(width, generator=generator).to(device, dtype) for _ in range(3))
    view = torch.stack((states, residual), -1)[..., 0]  # not contiguous
    pairs = [
        (layer_kernels.activate(own, some, is_exact=is_exact), activate(own, some, is_exact=is_exact))
        for own in (states, view) for some in (bias, None) for is_exact in (True, False)
    ]  # fmt: skip
    for own, some in ((states, bias), (view, None)):
        for shifted in (residual, residual + 100):  # a mean that is far larger than the deviations
            arguments = own, some, shifted, weight, shift, 1e-12
            pairs.append((layer_kernels.add_and_normalise(*arguments), add_and_normalise(*arguments)))
    for found, expected in pairs:
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        # Both round float32 once: at most the last bit of a value differs.
        torch.testing.assert_close(found, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@interpreted
@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # numpy's; a number divided by infinity is 0, as it is to be
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 33), (5, 384), (2, 1025), (2, 3072)])
def test_the_kernels_of_encoders_compute_what_the_library_does(dtype, num_rows, width):
    check_kernels_of_encoders("cpu", dtype, num_rows, width)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_the_kernels_of_encoders_compute_what_the_library_does(dtype):
    check_kernels_of_encoders("cuda", dtype, 300, 1025)


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_kernels_compute_what_the_library_does():
    check_kernels("cuda", torch.bfloat16, 1e-1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_on_a_gpu_layers_are_replaced(name):
    model = build_model(name).to("cuda", torch.bfloat16)
    token_ids = torch.arange(3, 20, device="cuda")[None]
    with torch.no_grad():
        expected = model(token_ids, use_cache=False).logits.float()
        assert fuse_layers(model) > 10
        far = (model(token_ids, use_cache=False).logits.float() - expected).abs().median()
    assert float(far) < 0.05 * float(expected.std())
