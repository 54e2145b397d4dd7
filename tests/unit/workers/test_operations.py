"""Items whose answers take several steps: what they cost, and what is left of them after a failed step. Layouts of replies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.work import WorkHeader
from sie.workers.model_api import SearchedImage
from sie.workers.operations import begin_again, fit_reply, take_unfinished
from sie.workers.requests.worker_request import RequestForm
from sie.workers.scheduling.waiting import WaitingItem

IDS = np.array([1], np.int32)


def item(cost: int, *, is_running: bool = True, ended: bool = False) -> WaitingItem:
    image = SearchedImage(np.zeros((1, 1, 3), np.uint8), (IDS,), b"")
    image.is_running = is_running
    return WaitingItem(SimpleNamespace(inputs=[image], costs=[cost], ended=ended), 0, cost, 0, 1)


def test_items_without_an_answer_run_again_at_no_cost_once_they_have_begun() -> None:
    complete, begun, waiting, gone = item(3), item(5), item(7, is_running=False), item(9, ended=True)
    assert take_unfinished([complete, begun, waiting, gone], [IDS, None, None, None]) == [begun, waiting]
    assert (begun.is_running, begun.num_tokens) == (True, 0)
    assert (waiting.is_running, waiting.num_tokens) == (False, 7)


def test_items_of_a_failed_step_have_their_cost_again() -> None:
    begun, new = item(5), item(7)
    take_unfinished([begun], [None])
    begin_again([begun, new])
    assert [(one.is_running, one.num_tokens) for one in (begun, new)] == [(False, 5), (False, 7)]


def test_layout_of_a_reply_follows_the_model_s_card() -> None:
    header = WorkHeader("m", "encode", 2, ())
    request: Any = SimpleNamespace(
        form=RequestForm(header, is_ragged=False, num_outputs=2, read=lambda _payload: ([], []))
    )
    before, after = (ModelCard(id="m", kind="encoder", dims={"dense": width}) for width in (4, 8))
    row_bytes = [fit_reply(request, card).row_bytes for card in (before, before, after, before)]

    assert row_bytes == [16, 16, 32, 16]
    with pytest.raises(BadRequest):
        fit_reply(request, ModelCard(id="m", kind="encoder", outputs=("sparse",)))
    assert fit_reply(request, after).row_bytes == 32
