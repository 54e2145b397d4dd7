"""Sampled tokens are among those that transformers' own processors keep, chosen by the number from seed and position.

A draw is the inverse of a distribution at a number known beforehand, so each one can be told exactly: its order is best
first and of equals the first where top_k or top_p is on, else that of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sie import native
from sie.values.generate import Sampling
from sie.workers.generation.sampling import choose, uniform
from sie.workers.model_api import Draw, Seen

VOCABULARY = 3000
SEED = 17
NUM_DRAWS = 300


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def way_to_draw(request):
    """Run each test with the library's draws, and with torch's."""
    native.allow(allowed=request.param == "compiled")
    yield
    native.allow(allowed=True)


def make_logits(kind: str) -> torch.Tensor:
    """Return logits (v,): smooth ones, or rounded ones as bfloat16 has them, of which thousands are equal."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
    return logits if kind == "smooth" else logits.bfloat16().float()


def oracle(logits: torch.Tensor, history: list[int], values: dict[str, Any]) -> torch.Tensor:
    """Return the probabilities (v,) that the library leaves."""
    steps = LogitsProcessorList()
    if "repetition_penalty" in values:
        steps.append(RepetitionPenaltyLogitsProcessor(values["repetition_penalty"]))
    if "temperature" in values:
        steps.append(TemperatureLogitsWarper(values["temperature"]))
    if "top_k" in values:
        steps.append(TopKLogitsWarper(values["top_k"]))
    if "top_p" in values:
        steps.append(TopPLogitsWarper(values["top_p"]))
    if "min_p" in values:
        steps.append(MinPLogitsWarper(values["min_p"]))
    return steps(torch.tensor([history]), logits[None].clone())[0].softmax(-1)


def expect(probabilities: torch.Tensor, is_sorted: bool, position: int) -> int:
    """Return the token at a position's number."""
    order = torch.arange(len(probabilities))
    if is_sorted:
        order = probabilities.sort(descending=True, stable=True).indices
    sums = np.cumsum(probabilities[order].double().numpy())
    place = np.searchsorted(sums, uniform(SEED, 0, position) * sums[-1], side="right")
    return int(order[place])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7},
        {"repetition_penalty": 1.4},
        {"min_p": 0.05},
        {"top_k": 7},
        {"top_k": 2000},
        {"top_p": 0.3},
        {"top_p": 0.97, "temperature": 3.0},
        {"top_k": 40, "min_p": 0.1, "temperature": 1.5, "repetition_penalty": 0.8},
    ],
)
def test_each_draw_is_the_one_of_the_library_s_distribution(values: dict[str, Any]) -> None:
    logits, history = make_logits("smooth"), [3, 3, 5, 9, 2999]
    seen = Seen(*(numbers.astype(np.int32) for numbers in np.unique(history, return_counts=True)))
    draws = [Draw(Sampling(seed=SEED, **values), 0, position, seen=seen) for position in range(NUM_DRAWS)]
    found = [chosen.token_id for chosen in choose(logits[None], [0] * NUM_DRAWS, draws)]
    probabilities = oracle(logits, history, values)
    expected = [expect(probabilities, "top_k" in values or "top_p" in values, at) for at in range(NUM_DRAWS)]
    # A number that falls on the edge of two tokens may go to either: sums are rounded.
    assert sum(one != other for one, other in zip(found, expected, strict=True)) <= 1
    assert all(probabilities[token] > 0 for token in found)


@pytest.mark.parametrize("values", [{"top_k": 50}, {"top_p": 0.6}, {"top_k": 1500, "top_p": 0.95}, {"top_p": 0.999}])
def test_equals_are_drawn_alike_whatever_is_drawn_beside_them(values: dict[str, Any]) -> None:
    logits = torch.stack([make_logits("rounded"), torch.zeros(VOCABULARY), make_logits("smooth")])
    draws = [Draw(Sampling(seed=SEED, **values), 0, position) for position in range(NUM_DRAWS)]
    alone = [chosen.token_id for draw in draws for chosen in choose(logits[:1], [0], [draw])]
    wide = Draw(Sampling(seed=1, top_k=2500), 0, 0)
    flat = Draw(Sampling(seed=2, top_p=0.99), 0, 0)
    for beside, row in ((wide, 2), (flat, 1)):
        chosen = choose(logits, [row, *[0] * NUM_DRAWS], [beside, *draws])[1:]
        assert [one.token_id for one in chosen] == alone
