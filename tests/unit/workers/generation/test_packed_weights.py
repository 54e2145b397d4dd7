"""Packed weights: the compiled layers against torch on the same rounded weights, and the error of rounding."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sie import native
from sie.native.linear import pack_bf16, pack_int4, pack_int8
from sie.workers.generation.packed_weights import (
    Bits,
    PackedLinear,
    Quantised,
    dequantise,
    pack_linears,
    round_int4,
    round_int8,
)
from tests.kernels import in_every_format, needs_kernels

BITS: tuple[Bits, ...] = (16, 8, 4)
DTYPES = (torch.float32, torch.bfloat16)
LARGEST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def random_matrix(outputs: int, inputs: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.1


@pytest.mark.parametrize("bits", BITS)
@in_every_format
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 17, 30])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 32), (15, 31), (130, 96), (257, 640)])
def test_a_packed_layer_is_torchs_own_on_rounded_weights(
    bits: Bits, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    weight, bias = random_matrix(outputs, inputs), torch.arange(outputs) * 0.01
    states = random_matrix(rows, inputs, seed=4).to(dtype)
    found = PackedLinear(Quantised(weight, bits), bias, num_threads=2)(states)
    expected = states.double() @ dequantise(weight, bits).double().T + bias.double()
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() <= LARGEST_ERROR[dtype] * max(1.0, expected.abs().max().item())


@needs_kernels
@pytest.mark.parametrize("rows", [3, 40])
def test_strided_and_deep_inputs_are_read_as_they_lie(rows: int) -> None:
    layer = PackedLinear(Quantised(random_matrix(48, 64), 8), None, num_threads=1)
    wide = random_matrix(rows, 200)
    assert torch.equal(layer(wide[:, 8:72]), layer(wide[:, 8:72].contiguous()))
    assert torch.equal(layer(wide[:, :128:2]), layer(wide[:, :128:2].contiguous()))
    assert layer(wide[None, :, :64]).shape == (1, rows, 48)
    assert layer(wide[:0, :64]).shape == (0, 48)


@pytest.mark.parametrize("bits", BITS)
def test_layers_packed_on_several_cores_have_the_same_bytes(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, found = random_matrix(1100, 40), []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for cores in ({0}, {0, 1, 2}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        found.append(Quantised(weight, bits).packed.tobytes())
    assert found[0] == found[1]


@needs_kernels
def test_threads_change_nothing() -> None:
    quantised = Quantised(random_matrix(1000, 128), 4)
    states = random_matrix(5, 128, seed=9)
    alone = PackedLinear(quantised, None, num_threads=1)(states)
    for _ in range(50):
        assert torch.equal(PackedLinear(quantised, None, num_threads=2)(states), alone)


@needs_kernels
def test_callers_on_several_threads_do_not_disturb_one_another() -> None:
    states = random_matrix(20, 96, seed=5)
    layers = [PackedLinear(Quantised(random_matrix(300, 96, seed=seed), 8), None, num_threads=2) for seed in range(4)]
    expected = [layer(states) for layer in layers]
    wrong: list[int] = []

    def work(number: int) -> None:
        if not all(torch.equal(layers[number](states), expected[number]) for _ in range(40)):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("bits", "largest"), [(8, 1e-4), (4, 5.8e-3)])
def test_rounding_stays_within_its_share_of_the_variance(bits: Bits, largest: float) -> None:
    weight = random_matrix(256, 512)
    error = (dequantise(weight, bits) - weight).square().mean() / weight.square().mean()
    assert error <= largest


def test_groups_of_zeros_and_of_tiny_weights_stay_finite() -> None:
    weight = random_matrix(4, 96)
    weight[1] = 0
    weight[2, 32:64] = 0
    weight[3] *= 1e-9
    for bits in (8, 4):
        found = dequantise(weight, bits)
        assert torch.isfinite(found).all()
        assert not found[1].any()
        assert not found[2, 32:64].any()


@pytest.mark.parametrize("bits", BITS)
@in_every_format
def test_without_kernels_torch_computes_the_same_model(
    bits: Bits, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = random_matrix(9, 64, seed=6).to(dtype)
    compiled = tiny_model()
    nbytes = pack_linears(compiled, bits, dtype)
    assert {type(layer) for layer in compiled} == {PackedLinear}
    assert nbytes < 1.2 * bits / 8 * (64 * 48 + 48 * 32) * 1.2
    with monkeypatch.context() as patch:
        patch.setattr(native, "load", lambda: None)
        plain = tiny_model()
        pack_linears(plain, bits, dtype)
    assert {type(layer) for layer in plain} == {nn.Linear}
    torch.testing.assert_close(
        compiled(states), plain(states), atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0.02
    )


def tiny_model() -> nn.Sequential:
    first, second = nn.Linear(64, 48), Conv1D(32, 48)
    with torch.no_grad():
        first.weight.copy_(random_matrix(48, 64))
        second.weight.copy_(random_matrix(48, 32, seed=8))
        first.bias.zero_()
    return nn.Sequential(first, second).requires_grad_(requires_grad=False)


def test_the_layouts_are_as_drawn() -> None:
    """Byte by byte, against the drawing in src/linear.h."""
    bits = random_matrix(17, 40).to(torch.bfloat16).view(torch.uint16).numpy()
    packed16 = pack_bf16(bits).view(np.uint16).reshape(2, 2, 16, 16, 2)
    assert packed16[0, 1, 3, 5, 1] == bits[5, 32 + 2 * 3 + 1]
    numbers, scales = round_int8(random_matrix(17, 40))
    packed = pack_int8(numbers, scales).reshape(2, 2, 32 + 32 * 16)
    assert packed[1, 1, :2].view(np.float16)[0] == scales[16, 1]
    quads = packed[:, :, 32:].reshape(2, 2, 8, 16, 4)
    assert int(quads[0, 1, 1, 5, 2]) - 128 == numbers[5, 32 + 4 + 2]
    places, scales = round_int4(random_matrix(17, 40))
    packed = pack_int4(places, scales).reshape(2, 2, 32 + 16 * 16)
    quads = packed[:, :, 32:].reshape(2, 2, 4, 16, 4)
    assert quads[0, 0, 1, 7, 3] == places[7, 8 + 3] | places[7, 8 + 4 + 3] << 4
    assert packed[1, 0, :2].view(np.float16)[0] == scales[16, 0]
