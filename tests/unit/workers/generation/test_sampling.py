"""Sampling from given logits: the oracle is the specified order of operations, written in numpy for one row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sie import native
from sie.values.errors import NonFinite
from sie.values.generate import Sampling
from sie.workers.generation import sampling
from sie.workers.generation.sampling import choose, launch_choice, uniform
from sie.workers.model_api import Draw, Seen

VOCABULARY = 200
LOGITS = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def way_to_draw(request):
    """Run each test with the library's draws, and with torch's."""
    native.allow(allowed=request.param == "compiled")
    yield
    native.allow(allowed=True)


class ListMatcher:
    """Allows what it is told to."""

    is_complete = False

    def __init__(self, allowed):
        self.allowed = allowed

    def fill_mask(self, allowed):
        bits = np.zeros(len(allowed) * 32, np.uint8)
        bits[self.allowed] = 1
        allowed[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token_id):
        raise AssertionError


def draw(position=7, choice=0, **values):
    extras = {name: values.pop(name) for name in ("seen", "forbidden", "logprobs", "matcher") if name in values}
    return Draw(Sampling(**values), choice, position, **extras)


def one(logits, wanted):
    return choose(logits[None], [0], [wanted])[0]


def many(logits, count=4000, **values):
    """Return how often each token is chosen, at as many positions."""
    draws = [draw(position, **values) for position in range(count)]
    tokens = [chosen.token_id for chosen in choose(logits[None], [0] * count, draws)]
    return np.bincount(tokens, minlength=len(logits)) / count


def test_uniform_numbers_are_spread_evenly_and_depend_on_every_argument():
    numbers = np.array([uniform(5, choice, position) for choice in range(4) for position in range(5000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 50, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 90  # chi squared of 49 degrees: one in 3,000 is over it
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert len({uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1), uniform(-1, 0, 0), uniform(2**64 - 2, 0, 0)}) == 5


def test_temperature_zero_takes_the_first_of_the_likeliest():
    logits = torch.zeros(10)
    logits[[4, 7]] = 3.0
    assert one(logits, draw(temperature=0.0)).token_id == 4
    assert one(logits, draw(temperature=0.0, logit_bias=((7, 0.5),))).token_id == 7


def test_top_k_one_is_greedy():
    assert one(LOGITS[0], draw(top_k=1)).token_id == int(LOGITS[0].argmax())


def test_frequencies_follow_the_softmax_at_its_temperature():
    for temperature in (1.0, 0.5, 2.0):
        expected = (LOGITS[0] / temperature).softmax(0).numpy()
        assert np.abs(many(LOGITS[0], temperature=temperature) - expected).max() < 0.03


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.1},
        {"top_k": 3, "temperature": 3.0, "top_p": 0.9},
    ],
)
def test_filters_keep_what_they_say_and_leave_the_rest_in_proportion(values):
    probabilities = (LOGITS[1] / values.get("temperature", 1.0)).softmax(0).double().numpy()
    order = np.argsort(-probabilities, kind="stable")
    kept = np.zeros(VOCABULARY, bool)
    mass = 0.0
    for place, token in enumerate(order):
        in_k = place < values.get("top_k", VOCABULARY)
        in_p = mass < values.get("top_p", 1.0)
        mass += probabilities[token]
        kept[token] = in_k and in_p and probabilities[token] >= values.get("min_p", 0.0) * probabilities[order[0]]
    expected = np.where(kept, probabilities, 0)
    expected /= expected.sum()
    found = many(LOGITS[1], **values)
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(kept))
    assert np.abs(found - expected).max() < 0.03


def test_a_nucleus_wider_than_the_candidates_is_sampled_whole():
    logits = torch.zeros(2000)
    found = many(logits, count=2400, top_p=0.9)
    # The nucleus of equal probabilities has 1,800 of them, of which three quarters are drawn at least once.
    assert 1200 < (found > 0).sum() <= 1801


def test_penalties_count_the_history_then_bias_is_added():
    seen = Seen(np.array([9, 3, 5], np.int32), np.array([1, 2, 1], np.int32))
    expected = LOGITS[2].clone().double().numpy()
    for token, count in ((3, 2), (5, 1), (9, 1)):
        lowered = expected[token] - 0.7 - 0.4 * count
        expected[token] = lowered / 1.3 if lowered > 0 else lowered * 1.3
    expected[11] += 4.0
    probabilities = np.exp(expected - expected.max())
    found = many(
        LOGITS[2], seen=seen, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3,
        logit_bias=((11, 4.0),),
    )  # fmt: skip
    assert np.abs(found - probabilities / probabilities.sum()).max() < 0.03
    assert many(LOGITS[2], count=50, seen=seen, logit_bias=((17, 100.0),))[17] == 1


def test_forbidden_tokens_and_grammars_bind_every_draw():
    best = int(LOGITS[0].argmax())
    second = int(LOGITS[0].topk(2).indices[1])
    assert one(LOGITS[0], draw(temperature=0.0, forbidden=(best,))).token_id == second
    assert set(np.flatnonzero(many(LOGITS[0], count=300, matcher=ListMatcher([4, 40, 199])))) == {4, 40, 199}
    assert one(LOGITS[0], draw(matcher=ListMatcher([31, 32]), forbidden=(31,))).token_id == 32
    # What a grammar leaves as the only choice is an end of text: it wins over its being ignored.
    assert one(LOGITS[0], draw(matcher=ListMatcher([31]), forbidden=(31,))).token_id == 31


def test_the_same_seed_draws_the_same_whatever_runs_beside_it():
    own = [draw(position, seed=11, top_p=0.8) for position in range(20)]
    plain = [draw(position, seed=11) for position in range(20)]
    alone = [one(LOGITS[3], each).token_id for each in own + plain]
    others = [draw(1, temperature=0.0), draw(2, seed=4, top_k=3, logprobs=2), draw(3, seen=Seen(np.array([1], np.int32), np.array([1], np.int32)),
              frequency_penalty=1.0)]  # fmt: skip
    together = choose(LOGITS, [0, 1, 2, *[3] * 40], [*others, *own, *plain])
    assert [chosen.token_id for chosen in together[3:]] == alone
    assert [one(LOGITS[3], draw(position, seed=12, top_p=0.8)).token_id for position in range(20)] != alone[:20]


def test_logprobs_are_those_before_temperature_and_filters():
    expected = LOGITS[0].log_softmax(0)
    chosen = one(LOGITS[0], draw(temperature=0.3, top_k=4, logit_bias=((50, 90.0),), logprobs=3))
    assert chosen.token_id == 50
    assert chosen.logprob.logprob == pytest.approx(float(expected[50]), abs=1e-5)
    assert [token for token, _ in chosen.logprob.top] == expected.topk(3).indices.tolist()
    assert [value for _, value in chosen.logprob.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-5)
    assert one(LOGITS[0], draw(temperature=0.0, logprobs=0)).logprob.top == ()
    assert one(LOGITS[0], draw(temperature=0.0)).logprob is None


@pytest.mark.parametrize("values", [{"temperature": 0.0}, {"top_p": 0.5}, {"logprobs": 1}])
def test_logits_that_are_not_finite_are_the_error_of_their_draw_alone(values):
    logits = LOGITS.clone()
    logits[1, 3] = torch.nan
    failed, *others = choose(logits, [1, 0, 2], [draw(**values) for _ in range(3)])
    assert isinstance(failed, NonFinite)
    assert others == [one(LOGITS[row], draw(**values)) for row in (0, 2)]


def test_half_precision_logits_are_sampled_in_float32():
    found = many(LOGITS[0].bfloat16())
    assert np.abs(found - LOGITS[0].bfloat16().float().softmax(0).numpy()).max() < 0.03


def test_draws_that_are_launched_are_the_same_and_come_in_one_copy(monkeypatch):
    copied = []
    monkeypatch.setattr(sampling, "read_later", lambda tensor: copied.append(tensor) or tensor.clone)
    kinds = ({}, {"temperature": 0.0}, {"top_k": 5, "seed": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"forbidden": (7,)},
             {"temperature": 0.0, "logprobs": 2}, {"logit_bias": ((9, 4.0),), "logprobs": 0})  # fmt: skip
    draws = [draw(position, **values) for position, values in enumerate(kinds)]
    rows = [0, 1, 1, 2, 3, 3, 0, 2]
    launched = launch_choice(LOGITS, rows, draws)
    assert len(copied) == 1
    found = launched.read()
    assert found == choose(LOGITS, rows, draws)
    assert launched.token_ids.tolist() == [one.token_id for one in found]
    greedy = [draw(temperature=0.0)] * 3
    assert launch_choice(LOGITS, [2, 0, 1], greedy).read() == choose(LOGITS, [2, 0, 1], greedy)


def test_a_launched_draw_that_needs_all_tokens_sorted_is_left_to_the_host():
    logits = torch.stack((torch.zeros(2000), torch.arange(2000.0), torch.full((2000,), torch.nan)))
    wide, narrow, failed = launch_choice(logits, [0, 1, 2], [draw(top_p=0.9, logprobs=1)] * 3).read()
    assert wide is None
    assert narrow.token_id > 1900
    assert isinstance(failed, NonFinite)
