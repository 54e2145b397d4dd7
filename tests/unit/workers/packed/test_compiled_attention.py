"""The compiled kernel and the library's attention give the same result, whichever a machine has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sie import native
from sie.native.attention import can_attend
from sie.workers.packed import attention
from sie.workers.packed.attention import Boundaries, attend, packed_step
from sie.workers.packed.batch import pack_sequences
from tests.kernels import in_every_format

LENGTHS = [1, 2, 12, 13, 16, 17, 33, 160, 12]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.usefixtures("two_threads")


def _attend(
    width: int, heads: tuple[int, int], dtype: torch.dtype, *, seen: bool, lengths: Sequence[int] = LENGTHS, **rule
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    # As a model has them: parts of one projection, a token's values side by side.
    states = torch.randn(1, sum(lengths), heads[0] + 2 * heads[1], width, generator=generator).to(dtype).transpose(1, 2)
    query, key, value = states.split((heads[0], heads[1], heads[1]), 1)
    attended = np.array([max(1, length - 3) for length in lengths], np.int32) if seen else None
    batch = pack_sequences([np.zeros(length, np.int32) for length in lengths], attended=attended)
    attended = None if batch.attended is None else torch.from_numpy(batch.attended)
    boundaries = Boundaries(torch.from_numpy(batch.cu_seqlens), batch.runs, batch.max_length, attended)
    with packed_step(boundaries):
        return attend(torch.nn.Module(), query, key, value, None, **rule)[0]


@in_every_format
@pytest.mark.parametrize(("width", "heads"), [(32, (3, 3)), (64, (4, 2)), (2, (1, 1)), (80, (2, 1)), (128, (2, 2))])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("window", "seen"), [(None, False), (1, False), (4, False), (20, False), (None, True), (4, True), (20, True)]
)
def test_the_kernel_gives_what_the_library_gives(dtype, width, heads, is_causal, window, seen, monkeypatch) -> None:
    rule = {"scaling": 0.2, "is_causal": is_causal, "sliding_window": window}
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_attend_runs", None)  # the kernel does it, or nobody
        got = _attend(width, heads, dtype, seen=seen, **rule)
    native.allow(allowed=False)
    try:
        expected = _attend(width, heads, dtype, seen=seen, **rule)
    finally:
        native.allow(allowed=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


@in_every_format
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("window", "seen"), [(None, False), (20, False), (240, False), (700, False), (None, True), (700, True)]
)
def test_long_sequences_give_what_the_library_gives(dtype, is_causal, window, seen, monkeypatch) -> None:
    rule = {
        "scaling": 0.4,
        "is_causal": is_causal,
        "sliding_window": window,
        "lengths": [511, 512, 513, 1100, 30, 2100],
    }
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_attend_runs", None)
        got = _attend(48, (2, 1), dtype, seen=seen, **rule)
    native.allow(allowed=False)
    try:
        expected = _attend(48, (2, 1), dtype, seen=seen, **rule)
    finally:
        native.allow(allowed=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


def test_a_format_that_the_kernel_has_not_goes_to_the_library() -> None:
    got = _attend(32, (2, 2), torch.float64, seen=False, is_causal=False)
    expected = _attend(32, (2, 2), torch.float32, seen=False, is_causal=False)
    assert got.dtype == torch.float64
    assert got.shape == expected.shape


def test_a_head_of_odd_width_goes_to_the_library() -> None:
    assert not can_attend(is_bf16=False, width=7)
    assert torch.isfinite(_attend(7, (2, 2), torch.float32, seen=False, is_causal=True)).all()
