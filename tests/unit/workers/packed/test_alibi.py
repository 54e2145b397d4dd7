"""Attention that distance weakens, against the formula written out."""

from __future__ import annotations

import math

import pytest
import torch

from sie.workers.packed import alibi, attention
from sie.workers.packed.alibi import alibi_slopes, attend_by_distance
from sie.workers.packed.attention import Boundaries, packed_step
from sie.workers.packed.batch import Run


def _expected(query, key, value, seen, scale):
    length = query.shape[2]
    places = torch.arange(length)
    slopes = alibi_slopes(query.shape[1], query.device)
    logits = query @ key.transpose(-1, -2) * scale
    logits = logits - slopes[:, None, None] * (places[:, None] - places).abs()
    if seen is not None:
        logits = logits.masked_fill(places >= seen, -math.inf)
    return logits.softmax(-1) @ value


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8.0]),
        (4, [2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0]),
        (12, [*(2.0**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_slopes_are_those_of_the_paper(heads, slopes):
    torch.testing.assert_close(alibi_slopes(heads, torch.device("cpu")), torch.tensor(slopes))


@pytest.mark.parametrize("seen", [None, 5])
@pytest.mark.parametrize("at_once", [1 << 20, 40])
def test_parts_of_a_long_text_give_what_the_whole_gives(at_once, seen, monkeypatch):
    monkeypatch.setattr(alibi, "_MAX_BIAS_ELEMENTS", at_once)
    query, key, value = torch.randn(3, 2, 3, 11, 8)
    mask = None if seen is None else (torch.arange(11) < seen)[None, None, None]
    found = attend_by_distance(query, key, value, mask, 0.3)
    torch.testing.assert_close(found, _expected(query, key, value, seen, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attended", [None, torch.tensor([2, 4, 6])])
def test_a_packed_step_keeps_texts_apart(attended):
    """Two texts of four tokens and one of seven, of which some tokens are not seen."""
    bounds, runs = torch.tensor([0, 4, 8, 15], dtype=torch.int32), (Run(0, 2, 4), Run(8, 1, 7))
    query, key, value = torch.randn(3, 1, 2, 15, 8)
    module = torch.nn.Module()
    module.is_alibi = True
    module.is_causal = False
    with packed_step(Boundaries(bounds, runs, 7, attended)):
        found, _ = attention.attend(module, query, key, value, None, scaling=0.3)
    for index, (start, end) in enumerate([(0, 4), (4, 8), (8, 15)]):
        part = [states[:, :, start:end] for states in (query, key, value)]
        expected = _expected(*part, None if attended is None else int(attended[index]), 0.3)
        torch.testing.assert_close(found[:, start:end], expected.transpose(1, 2), rtol=1e-4, atol=1e-5)
