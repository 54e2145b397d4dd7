"""Edits of a step's logits go to the device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sie.values.generate import Sampling
from sie.workers.device import device
from sie.workers.device.capture import refusing_waits
from sie.workers.generation.logit_edits import edit_logits
from sie.workers.generation.sampling import launch_choice
from sie.workers.model_api import Draw, Seen

VOCABULARY = 45
META = torch.device("meta")
MATCHER = object()


def test_logits_without_edits_are_not_copied():
    raw = torch.randn(2, VOCABULARY)
    assert edit_logits(raw, [Draw(Sampling(), 0, 7, Seen(*np.ones((2, 1), np.int32)))] * 2, ()) is raw


@pytest.fixture
def moved(monkeypatch):
    """Record the copies to the stand-in for a GPU, which computes nothing but tells what would wait for it."""
    found = []
    monkeypatch.setattr(device, "move", lambda tensor, to: found.append(tensor) or torch.empty_like(tensor, device=to))
    return found


def edited(number):
    history = Seen(np.arange(number % 7, 40, dtype=np.int32), np.ones(40 - number % 7, np.int32))
    sampling = Sampling(repetition_penalty=1.2, logit_bias=((3, 1.0),), temperature=0.0)
    return Draw(sampling, 0, 7, history, (5,))


def test_all_penalties_of_a_step_go_to_the_device_in_one_copy(moved):
    with refusing_waits():
        launch_choice(torch.empty(64, VOCABULARY, device=META), range(64), [edited(number) for number in range(64)])
    assert len(moved) == 1


def test_all_grammar_masks_of_a_step_go_to_the_device_in_one_copy_as_bits(moved):
    masks = np.zeros((64, VOCABULARY), bool)
    with refusing_waits():
        edit_logits(
            torch.empty(64, VOCABULARY, device=META), [Draw(Sampling(), 0, 7, matcher=MATCHER)] * 64, list(masks)
        )
    (packed,) = moved
    assert packed.numel() < 64 * (6 + 3 * 4) + 256 * 8 + 8 * 8, "masks, penalties, and the bits of each byte"
