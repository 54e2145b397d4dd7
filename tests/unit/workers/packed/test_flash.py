"""The arguments of torch's flash attention for packed encoders, with stand-ins for torch 2.11 and 2.13."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sie.workers.device.device import is_ampere
from sie.workers.packed import attention, flash
from sie.workers.packed.attention import Boundaries
from sie.workers.packed.batch import Run
from sie.workers.packed.flash import can_attend_flash
from tests import varlen_stand_ins

LENGTHS = (3, 3, 9)


@pytest.fixture(params=["of_2_11", "of_2_13"])
def flash_attention(request, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", getattr(varlen_stand_ins, request.param))
    flash._asks_about_groups.cache_clear()
    yield
    flash._asks_about_groups.cache_clear()


def boundaries(attended=None):
    cu_seqlens = torch.from_numpy(np.cumsum((0, *LENGTHS), dtype=np.int32))
    return Boundaries(cu_seqlens, (Run(0, 2, 3), Run(6, 1, 9)), 9, attended)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("keys", [4, 2])
@pytest.mark.usefixtures("flash_attention")
def test_the_call_gives_what_runs_of_equal_length_give(causal, window, keys):
    query, key, value = (torch.randn(heads, sum(LENGTHS), 8) for heads in (4, keys, keys))
    rule = attention._Rule(0.4, causal, window)
    found = attention._attend_varlen(query, key, value, boundaries(), rule)
    expected = attention._attend_runs(query, key, value, boundaries(), rule)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.usefixtures("flash_attention")
def test_tokens_that_are_not_seen_are_no_keys():
    query, key, value = (torch.randn(2, sum(LENGTHS), 8) for _ in range(3))
    seen = torch.tensor([3, 1, 5], dtype=torch.int32)
    rule = attention._Rule(None, False, None)
    found = attention._attend_varlen(query, key, value, boundaries(seen), rule)
    assert torch.allclose(found, attention._attend_runs(query, key, value, boundaries(seen), rule), atol=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "expected"),
    [
        ("cuda", torch.bfloat16, (64, 64), True),
        ("cuda", torch.float16, (256, 256), True),
        ("cuda", torch.float32, (64, 64), False),
        ("cpu", torch.bfloat16, (64, 64), False),
        ("cuda", torch.bfloat16, (192, 128), False),
        ("cuda", torch.bfloat16, (20, 20), False),
        ("cuda", torch.bfloat16, (512, 512), False),
    ],
)
def test_what_the_kernel_does_not_compute_is_not_given_to_it(device, dtype, widths, expected, monkeypatch):
    monkeypatch.setattr(flash, "is_ampere", lambda _device: True)
    assert can_attend_flash(torch.device(device), dtype, widths) is expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_older_than_ampere_are_asked_once_and_not_given_flash_attention(capability, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability)
    is_ampere.cache_clear()
    for _ in range(3):
        assert can_attend_flash(torch.device("cuda", 0), torch.float16, (64, 64)) is expected
    is_ampere.cache_clear()
    assert len(asked) == 1
