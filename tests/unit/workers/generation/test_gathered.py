"""Attention over gathered keys and values: the memory that capped scores and sinks take."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sie.workers.generation import gathered
from sie.workers.generation.gathered import attend_one, band_mask
from sie.workers.generation.paged_cache import Rule

HEADS, LENGTH, WIDTH = 4, 96, 8
RULES = {"capped": Rule(0.3, softcap=5.0), "sinks": Rule(0.3, sinks=torch.linspace(-1, 1, HEADS))}


class _Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.numel = max(self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)), 0)
        return out


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_scores_of_a_long_prompt_are_computed_for_some_queries_at_a_time(rule, window, monkeypatch):
    query = torch.randn(HEADS, LENGTH, WIDTH)
    key, value = torch.randn(2, 2, LENGTH, WIDTH)
    mask = None if window is None else band_mask(LENGTH, window, key)
    expected = attend_one(query, key, value, mask, rule)
    most = HEADS * LENGTH * 10
    monkeypatch.setattr(gathered, "_MAX_SCORES", most)
    with _Largest() as largest:
        found = attend_one(query, key, value, mask, rule)
    torch.testing.assert_close(found, expected)
    assert largest.numel <= max(most + HEADS * LENGTH, LENGTH * LENGTH), "the sinks are one more column of scores"


def test_a_query_that_sees_more_rows_than_fit_is_computed_alone(monkeypatch):
    query, key = torch.randn(HEADS, 3, WIDTH), torch.randn(2, 3, WIDTH)
    expected = attend_one(query, key, key, None, RULES["capped"])
    monkeypatch.setattr(gathered, "_MAX_SCORES", 1)
    torch.testing.assert_close(attend_one(query, key, key, None, RULES["capped"]), expected)
