"""A model's head by itself, against the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sie.workers.runners.stand_in import ModelHead

IDS = torch.arange(10, 18).reshape(2, 4)


@pytest.fixture
def make_model(make_checkpoint: Any) -> Any:
    def make(auto: Any, family: str) -> Any:
        directory: Path = make_checkpoint(family, auto=auto)
        return auto.from_pretrained(directory).eval()

    return make


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "distilbert", "deberta-v2"])
@pytest.mark.parametrize(
    "auto",
    [
        transformers.AutoModelForTokenClassification,
        transformers.AutoModelForSequenceClassification,
        transformers.AutoModelForMaskedLM,
    ],
)
@torch.inference_mode()
def test_head_on_the_transformers_states_is_the_model(auto: Any, family: str, make_model: Any) -> None:
    model = make_model(auto, family)
    expected = model(input_ids=IDS).logits
    hidden = model.base_model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(ModelHead(model)(hidden, input_ids=IDS), expected)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)  # it is whole again


@torch.inference_mode()
def test_model_is_whole_after_a_head_that_failed(make_model: Any) -> None:
    model = make_model(transformers.AutoModelForTokenClassification, "bert")
    expected = model(input_ids=IDS).logits
    with pytest.raises(RuntimeError):
        ModelHead(model)(torch.zeros(2, 4, 5), input_ids=IDS)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected)
