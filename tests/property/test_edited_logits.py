"""Edits of all rows of a step are bit for bit those of each row, one edit after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sie.values.errors import BadRequest
from sie.values.generate import Sampling
from sie.workers.generation import logit_edits
from sie.workers.generation.logit_edits import edit_logits
from sie.workers.model_api import Draw, Seen

VOCABULARY = 45
MATCHER = object()

ids = st.integers(0, VOCABULARY + 3)
penalty = st.sampled_from([0.0, 0.3, -1.7, 2.0])
seen = st.dictionaries(ids, st.integers(1, 900), max_size=9).map(
    lambda counts: Seen(np.array(list(counts), np.int32), np.array(list(counts.values()), np.int32))
)
mask = st.integers(0, (1 << VOCABULARY) - 1).map(
    lambda bits: np.array([bits >> place & 1 for place in range(VOCABULARY)], bool)
)
draws = st.tuples(
    st.builds(
        Sampling, presence_penalty=penalty, frequency_penalty=penalty,
        repetition_penalty=st.sampled_from([1.0, 1.1, 0.7, 3.0]),
        logit_bias=st.lists(st.tuples(st.integers(-2, VOCABULARY + 3), st.floats(-50, 50, width=32)), max_size=5).map(tuple),
    ),
    st.just(0), st.just(7), st.none() | seen, st.lists(ids, max_size=3).map(tuple),
).map(lambda fields: Draw(*fields))  # fmt: skip
rows = st.tuples(draws, st.none() | mask | st.just(BadRequest("no token is allowed")))


def expected_row(row, draw, hidden):
    """Return a row's logits by the definition of `Sampling`, one edit after another, in float32."""
    row, sampling = row.clone(), draw.sampling
    if draw.seen is not None:
        known = draw.seen.ids < VOCABULARY
        own, counts = torch.from_numpy(draw.seen.ids[known]).long(), torch.from_numpy(draw.seen.counts[known]).float()
        values = row[own] - sampling.presence_penalty - sampling.frequency_penalty * counts
        factor = sampling.repetition_penalty
        row[own] = torch.where(values > 0, values / factor, values * factor)
    for token_id, value in sampling.logit_bias:
        if 0 <= token_id < VOCABULARY:
            row[token_id] += value
    if isinstance(hidden, np.ndarray):
        return row.masked_fill(torch.from_numpy(hidden), -torch.inf)
    row[[token_id for token_id in draw.forbidden if token_id < VOCABULARY]] = -torch.inf
    return row


@settings(max_examples=150, deadline=None)
@given(wanted=st.lists(rows, min_size=1, max_size=6), seed=st.integers(0, 99), packs=st.booleans())
def test_edits_of_a_step_are_bit_for_bit_those_of_each_row(wanted, seed, packs):
    """Masks are packed for a GPU only, but this works on a CPU as well."""
    raw = torch.randn(len(wanted), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    before = raw.clone()
    own = [draw if hidden is None else draw._replace(matcher=MATCHER) for draw, hidden in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logit_edits, "_packs", lambda _device: packs)
        found = edit_logits(raw, own, [hidden for _, hidden in wanted if hidden is not None])
    assert torch.equal(raw, before)
    for row, logits, (draw, hidden) in zip(found, raw, wanted, strict=True):
        assert torch.equal(row.view(torch.int32), expected_row(logits, draw, hidden).view(torch.int32))
