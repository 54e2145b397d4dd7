"""The library's draws against full sums in float64: every token that a draw may take, and none that it may not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sie import native
from sie.native import Feature
from sie.native import draw as native_draw
from sie.values.generate import Sampling
from sie.workers.generation.sampling import choose, uniform
from sie.workers.generation.sequences import SeenTokens, Tokens
from sie.workers.model_api import Draw, Seen
from tests.kernels import limited_to, needs_kernels

TOLERANCE = 1e-5
pytestmark = needs_kernels

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.013, 0.31, 0.7, 1.0, 3.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 17, 400, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.0123, 0.4321, 0.9123, 0.99987]),
    min_p=st.sampled_from([0.0, 0.0, 0.0123, 0.345]),
    seed=st.integers(0, 1 << 62),
)


def interval(logits: np.ndarray, sampling: Sampling, forbidden: tuple[int, ...], token: int) -> tuple[float, float]:
    """Return the numbers in [0, 1) at which a token is drawn, as (first, end); an empty one for a token that never is."""
    scores = logits.astype(np.float64).copy()
    scores[list(forbidden)] = -np.inf
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    is_sorted = sampling.top_k or sampling.top_p < 1
    order = np.lexsort((np.arange(len(scores)), -scores)) if is_sorted else np.arange(len(scores))
    sums = np.cumsum(weights[order])
    places = np.arange(len(scores))
    is_kept = weights[order] >= sampling.min_p
    if sampling.top_k:
        is_kept &= places < sampling.top_k
    if sampling.top_p < 1:
        is_kept &= sums - weights[order] < sampling.top_p * sums[-1]
    ends = np.cumsum(np.where(is_kept, weights[order], 0))
    place = int(np.flatnonzero(order == token)[0])
    if not is_kept[place]:
        return 1.0, 0.0
    return (ends[place - 1] if place else 0.0) / ends[-1], ends[place] / ends[-1]


@pytest.mark.parametrize("size", [512, 700, 2000])
@pytest.mark.parametrize("last", [0, 3, 511])
def test_a_number_behind_all_weights_draws_the_last_token_that_has_one(size, last):
    """Sums of blocks may round to less than their total. Then the draw falls behind the last weight."""
    logits = np.full(size, -1e30, np.float32)
    logits[: last + 1] = 0
    draw = native_draw.Draw(
        logits=logits.ctypes.data, number=1.0, temperature=1.0, top_p=1.0, min_p=0.5, vocabulary=size
    )
    assert native_draw.draw_tokens([draw], 1) == [last]


@pytest.mark.parametrize("processor", [native.features(), Feature.AVX2])
@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 3000),
    seed=st.integers(0, 1000),
    rounding=st.sampled_from([0.0, 0.5]),
    num_forbidden=st.integers(0, 3),
    sampling=samplings,
    num_rows=st.integers(1, 4),
)
def test_a_drawn_token_is_the_one_at_its_number(processor, size, seed, rounding, num_forbidden, sampling, num_rows):
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((num_rows, size)) * 3).astype(np.float32)
    if rounding:  # many equals
        logits = np.round(logits / rounding).astype(np.float32) * np.float32(rounding)
    forbidden = tuple(random.choice(size, min(num_forbidden, size - 1), replace=False).tolist())
    draws = [Draw(sampling, 0, position, forbidden=forbidden) for position in range(num_rows)]
    with limited_to(processor):
        found = [chosen.token_id for chosen in choose(torch.from_numpy(logits), range(num_rows), draws)]
    for row, token in enumerate(found):
        assert token not in forbidden
        if sampling.temperature == 0 or sampling.top_k == 1:
            scores = logits[row].copy()
            scores[list(forbidden)] = -np.inf
            assert token == int(scores.argmax())
            continue
        first, end = interval(logits[row], sampling, forbidden, token)
        assert first - TOLERANCE <= uniform(sampling.seed, 0, row) <= end + TOLERANCE


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    ends=st.tuples(*[st.lists(st.integers(0, 70), max_size=40)] * 2),
    seed=st.integers(0, 1 << 62),
)
def test_counted_tokens_are_penalised_as_those_of_the_whole_text(prompt, ends, seed):
    first, seen = Tokens(np.array(prompt, np.int32)), SeenTokens()
    seen.read(first)
    for end, counted in zip(ends, (seen.copy(), seen), strict=True):
        tokens = Tokens(np.array(prompt, np.int32))
        for token_id in end:
            tokens.append(token_id)
            if token_id % 3:
                counted.read(tokens)
        found = counted.read(tokens)
        expected = Seen(*np.unique(tokens.view(0, len(tokens)), return_counts=True))
        assert dict(zip(*map(np.ndarray.tolist, found), strict=True)) == dict(
            zip(*map(np.ndarray.tolist, expected), strict=True)
        )
        logits = torch.linspace(-2, 2, 71)[None]
        sampling = Sampling(seed=seed, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.3)
        both = [Draw(sampling, 0, 7, which, logprobs=2) for which in (found, expected)]
        assert len(set(choose(logits, [0, 0], both))) == 1
