"""Items on their way to a runner, and those whose answers take several steps: what is left of them after a failed step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.work import WorkHeader
from sie.workers.model_api import ImageItem, RowStep, SearchedImage, StepOutputs
from sie.workers.operations import begin_again, fit_reply, forward, take_unfinished
from sie.workers.packed.adjacent import AdjacentItems
from sie.workers.requests.worker_request import RequestForm
from sie.workers.scheduling.waiting import WaitingItem

IDS = np.array([1], np.int32)


class Recorder:
    """Remember the steps that it is asked to run."""

    def __init__(self) -> None:
        self.steps: list[RowStep] = []

    def run(self, step: RowStep) -> StepOutputs:
        self.steps.append(step)
        return StepOutputs()


def waiting(inputs: Any, index: int, num_items: int) -> WaitingItem:
    """Return some of a request's items, which wait together."""
    header = WorkHeader("m", "encode", len(inputs), ())
    request = SimpleNamespace(inputs=inputs, header=header, comparison=None)
    return WaitingItem(request, index, num_items, 0, 1, num_items=num_items, costs=[1] * num_items)


def test_token_ids_of_items_that_wait_together_reach_a_runner_in_one_piece() -> None:
    ids = np.arange(9, dtype=np.int32)
    many, lone = AdjacentItems([ids], [2, 3, 4]), [ids[4:6]]
    items = [waiting(many, 0, 3), waiting(lone, 0, 1), waiting(many, 1, 2)]
    runner = Recorder()
    forward(runner, items)

    (step,) = runner.steps
    assert isinstance(step.inputs, AdjacentItems)
    assert [piece.tolist() for piece in step.inputs.pieces] == [ids.tolist(), [4, 5], ids[2:].tolist()]
    assert [row.tolist() for row in step.inputs] == [row.tolist() for row in (*many, *lone, *many[1:])]
    assert step.wants == [item.request.header for item in items for _ in range(item.num_items)]


def test_images_and_texts_of_a_request_reach_a_runner_one_by_one() -> None:
    image = ImageItem((np.zeros((1, 1, 3), np.uint8),))
    mixed = [IDS, image, IDS]
    runner = Recorder()
    forward(runner, [waiting(mixed, 0, 3), waiting(mixed, 1, 1)])

    assert runner.steps[0].inputs == [*mixed, image]


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
