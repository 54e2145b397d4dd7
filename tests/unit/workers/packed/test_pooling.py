from __future__ import annotations

import numpy as np
import pytest
import torch

from sie import native
from sie.workers.packed.pooling import POOLINGS, pool

LENGTHS = [1, 4, 7, 2, 7]
CU_SEQLENS = torch.tensor([0, 1, 5, 12, 14, 21], dtype=torch.int32)


def _pooling(dims: int, modes: list[str]) -> torch.nn.Module:
    from sentence_transformers.sentence_transformer.modules import Pooling

    return Pooling(dims, pooling_mode=modes)


@pytest.mark.parametrize("modes", [*[[mode] for mode in POOLINGS], list(POOLINGS), ["weightedmean", "cls"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mode_equals_sentence_transformers(modes: list[str], dtype: torch.dtype) -> None:
    hidden = torch.randn(21, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    padded = torch.nn.utils.rnn.pad_sequence(hidden.split(LENGTHS), batch_first=True).float()
    mask = torch.tensor([[position < length for position in range(7)] for length in LENGTHS]).long()
    expected = _pooling(6, modes)({"token_embeddings": padded, "attention_mask": mask})["sentence_embedding"]
    got = pool(hidden, CU_SEQLENS, modes)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 40])
def test_the_kernel_and_the_library_take_the_same_mean(dtype: torch.dtype, width: int) -> None:
    hidden = torch.randn(21, width, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = pool(hidden, CU_SEQLENS, ["mean"])
    native.allow(allowed=False)
    try:
        expected = pool(hidden, CU_SEQLENS, ["mean"])
    finally:
        native.allow(allowed=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_half_precision_sums_in_float32() -> None:
    hidden = torch.full((5000, 1), 1.0, dtype=torch.bfloat16)
    assert pool(hidden, torch.tensor([0, 5000], dtype=torch.int32), ["mean"]).item() == 1.0


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(KeyError):
        pool(torch.zeros(1, 1), torch.tensor([0, 1]), ["median"])
