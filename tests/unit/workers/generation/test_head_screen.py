"""Greedy steps that ask a rounded head first choose the tokens of the exact logits, also where rounding hides the largest."""

from __future__ import annotations

import pytest
import torch

from sie.values.errors import NonFinite
from sie.values.generate import Sampling
from sie.workers.model_api import Draw, Slot
from tests.generation_models import FAMILIES, load, random_prompt, save
from tests.kernels import needs_bf16_kernels

pytestmark = [needs_bf16_kernels, pytest.mark.usefixtures("two_threads")]
WIDTH = 96


@pytest.fixture
def make_runner(tmp_path, monkeypatch):
    """Return what loads a tiny Gemma whose head is most of its weights, after `change(embeddings)`."""

    def make(vocab_size, change=lambda _: None):
        config, values = FAMILIES["gemma3"]
        monkeypatch.setitem(FAMILIES, "wide", (config, {**values, "hidden_size": WIDTH, "vocab_size": vocab_size}))
        saved = save(tmp_path / "wide", "wide")
        model = config_model(saved)
        with torch.no_grad():
            change(model.get_input_embeddings().weight)
        model.save_pretrained(saved)
        runner = load(saved, dtype="bfloat16", max_sequences=64)
        assert runner.decoder is not None
        assert runner.decoder.screen is not None
        return runner

    return make


def config_model(directory):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def slots_of(count, forbidden=()):
    prompts = [random_prompt(1 + i % 5, i) for i in range(count)]
    return [
        Slot(prompt, 0, [i], (Draw(Sampling(temperature=0.0), 0, len(prompt), forbidden=tuple(forbidden)),))
        for i, prompt in enumerate(prompts)
    ]


def chosen(runner, slots):
    return [token.token_id for (token,) in runner.run_step(slots)]


def first_largest(logits):
    return [int((row == row.max()).nonzero()[0]) for row in logits]  # argmax may return any of equals


@pytest.mark.parametrize("vocab_size", [4096, 4095, 4001, 4017])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 15, 29, 32, 33])
def test_the_tokens_are_those_of_the_exact_logits(count, vocab_size, make_runner):
    runner = make_runner(vocab_size)
    logits = runner.run_logits(slots_of(count)).clone()
    assert chosen(runner, slots_of(count)) == first_largest(logits)
    forbidden = logits.topk(3).indices.flatten().unique().tolist()
    logits[:, forbidden] = -torch.inf
    assert chosen(runner, slots_of(count, forbidden)) == first_largest(logits)


@pytest.mark.parametrize("spread", [0.0, 2e-3, 2e-2])
def test_tokens_that_rounding_cannot_tell_apart_are_told_apart(spread, make_runner):
    """The largest outputs are one row, or its opposite, with a little noise; the first of equals wins."""

    def change(weight):
        noise = torch.randn(len(weight), WIDTH, generator=torch.Generator().manual_seed(3)) * spread
        weight[2000:3000] = 3 * weight[7] * (1 + noise[2000:3000])
        weight[3000:] = -3 * weight[7] * (1 + noise[3000:])

    runner = make_runner(4000, change)
    for count in (1, 8, 32):
        logits = runner.run_logits(slots_of(count)).clone()
        assert chosen(runner, slots_of(count)) == first_largest(logits)


def test_columns_and_rows_of_very_different_sizes_stay_exact(make_runner):
    def change(weight):
        sizes = torch.randn(len(weight), generator=torch.Generator().manual_seed(4)).mul(2).exp()
        weight *= torch.logspace(-3, 1, WIDTH) * sizes[:, None]
        weight[50:80] = 0

    runner = make_runner(4000, change)
    for count in (1, 8, 32):
        logits = runner.run_logits(slots_of(count)).clone()
        assert chosen(runner, slots_of(count)) == first_largest(logits)


def test_values_that_are_not_numbers_choose_nothing(make_runner):
    runner = make_runner(4000)
    slots = slots_of(5)
    runner.model.get_input_embeddings().weight.data[int(slots[2].token_ids[0])] = torch.nan
    found = runner.run_step(slots)
    is_odd = [int(slots[2].token_ids[0]) in slot.token_ids for slot in slots]
    assert [isinstance(one, NonFinite) for one in found] == is_odd
    assert not all(is_odd)
