from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from sie.workers.packed.attention import Boundaries, NotPackableError, attend, packed_step
from sie.workers.packed.batch import pack_sequences

LENGTHS = [9, 1, 4, 9, 4, 4]
TOKENS = sum(LENGTHS)


def _boundaries() -> Boundaries:
    batch = pack_sequences([np.zeros(length, dtype=np.int32) for length in LENGTHS])
    return Boundaries(torch.from_numpy(batch.cu_seqlens), batch.runs, batch.max_length)


def _states(heads: int, seed: int) -> torch.Tensor:
    return torch.randn(1, heads, TOKENS, 8, generator=torch.Generator().manual_seed(seed))


def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, window: int | None, scale: float
) -> torch.Tensor:
    """Attention by its definition, a sequence at a time in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows = []
    start = 0
    for length in sorted(LENGTHS):
        part = slice(start, start + length)
        q, k, v = (states[0, :, part].double() for states in (query, key, value))
        scores = q @ k.transpose(1, 2) * scale
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if window is not None:
            scores = scores.masked_fill(distance.abs() >= window, -torch.inf)
        rows.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(rows)[None].float()


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
def test_packed_equals_each_sequence_alone(key_heads: int, causal: bool, window: int | None) -> None:
    query, key, value = _states(4, 1), _states(key_heads, 2), _states(key_heads, 3)
    with packed_step(_boundaries()) as boundaries:
        got, weights = attend(
            torch.nn.Module(), query, key, value, None, scaling=0.3, is_causal=causal, sliding_window=window
        )
    expected = _one_by_one(query, key, value, causal=causal, window=window, scale=0.3)
    assert weights is None
    assert boundaries.num_calls == 1
    np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias"])
def test_what_is_not_computed_is_refused(extra: str) -> None:
    states = _states(2, 1)
    with packed_step(_boundaries()), pytest.raises(NotPackableError, match=extra):
        attend(torch.nn.Module(), states, states, states, None, **{extra: torch.ones(1)})


def test_mask_is_refused() -> None:
    states = _states(2, 1)
    with packed_step(_boundaries()), pytest.raises(NotPackableError):
        attend(torch.nn.Module(), states, states, states, torch.ones(1, 1, TOKENS, TOKENS))


def test_call_outside_a_step_is_refused() -> None:
    states = _states(2, 1)
    with packed_step(_boundaries()):
        pass
    with pytest.raises(NotPackableError):
        attend(torch.nn.Module(), states, states, states, None)


def test_step_belongs_to_its_thread() -> None:
    states, refused = _states(2, 1), []

    def run() -> None:
        try:
            attend(torch.nn.Module(), states, states, states, None)
        except NotPackableError:
            refused.append(True)

    with packed_step(_boundaries()):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
    assert refused == [True]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_tokens_that_are_not_seen_still_see_the_others(causal: bool, window: int | None) -> None:
    seen = np.array([4, 1, 2, 9, 4, 3], np.int32)
    batch = pack_sequences([np.zeros(length, dtype=np.int32) for length in LENGTHS], attended=seen)
    assert batch.attended is not None
    boundaries = Boundaries(torch.from_numpy(batch.cu_seqlens), batch.runs, batch.max_length,
                            torch.from_numpy(batch.attended))  # fmt: skip
    query, key, value = _states(4, 1), _states(2, 2), _states(2, 3)
    with packed_step(boundaries):
        got, _ = attend(
            torch.nn.Module(), query, key, value, None, scaling=0.3, is_causal=causal, sliding_window=window
        )
    start = 0
    for length, count in zip(sorted(LENGTHS), batch.attended.tolist(), strict=True):
        scores = torch.einsum("hqd,hkd->hqk", query[0, :, start : start + length],
                              key[0, :, start : start + length].repeat_interleave(2, 0)) * 0.3  # fmt: skip
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        hidden = (torch.arange(length) >= count)[None, :] | (distance < 0 if causal else distance < -length)
        if window is not None:
            hidden = hidden | (distance.abs() >= window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,hkd->qhd", weights, value[0, :, start : start + length].repeat_interleave(2, 0))
        sees_some = ~hidden.all(1)
        np.testing.assert_allclose(got[0, start : start + length][sees_some], expected[sees_some], rtol=1e-4, atol=1e-5)
        start += length


def test_batch_in_which_all_is_seen_is_an_ordinary_one() -> None:
    lengths = np.array(LENGTHS, np.int32)
    assert pack_sequences([np.zeros(length, dtype=np.int32) for length in LENGTHS], attended=lengths).attended is None
