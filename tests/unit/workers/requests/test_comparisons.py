"""Scores by vectors in the step loop: one query, documents over as many steps as they take, one reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from sie.frontend.engine.worker_link import ShmPending
from sie.values.card import LateInteraction, ModelCard
from sie.values.errors import BadRequest, Internal, Overloaded
from sie.values.work import WorkHeader
from sie.workers.model_api import RowStep, Side, StepOutputs
from sie.workers.scheduling.waiting import Budget
from tests.unit.engine_rig import FAR_NS, Rig, Worker, checksum, in_rig

SMALL = Budget(max_tokens=8, max_items=4, max_age_ns=10**12)
LATE = ModelCard(id="late", kind="encoder", outputs=("multivector", "score"), dims={"multivector": 4},
                 late=LateInteraction())  # fmt: skip
MISSING = 999
"""A document with this token has no vector."""


class ProductRunner:
    """Score a document with its sum times its query's, and remember each step: token ids, and whether of a query."""

    memory_bytes = 0

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.steps: list[list[tuple[list[int], bool]]] = []

    def run(self, step: RowStep) -> StepOutputs:
        inputs, sides = step.inputs, cast("Sequence[Side]", step.wants)
        self.steps.append([(ids.tolist(), side.is_query) for ids, side in zip(inputs, sides, strict=True)])
        for ids, side in zip(inputs, sides, strict=True):
            if side.is_query:
                side.comparison.query = float(ids.sum())
        scores = [0 if side.is_query else -np.inf if MISSING in ids else side.comparison.query * float(ids.sum())
                  for ids, side in zip(inputs, sides, strict=True)]  # fmt: skip
        return StepOutputs(scores=np.array(scores, np.float32)[:, None])

    @property
    def num_queries(self) -> int:
        return sum(is_query for step in self.steps for _, is_query in step)


def start(rig: Rig, card: ModelCard = LATE) -> tuple[Worker, ProductRunner]:
    worker = rig.start_worker("m")
    worker.build = ProductRunner
    worker.load("late", card)
    rig.tell("late", workers=(worker.slot,))
    return worker, worker.runners["late"]


def ask(rig: Rig, query: list[int], *documents: list[int], compared: Any = (("multivector", 1.0),)) -> ShmPending:
    items = [query, *documents]
    arrays = [
        ("cu_seqlens", np.cumsum([0, *map(len, items)], dtype=np.int32)),
        ("token_ids", np.array([token for ids in items for token in ids], np.int32)),
    ]
    header = WorkHeader("late", "score", len(items), (), compared=compared)
    return rig.engine.submit(header, arrays, sum(map(len, items)), FAR_NS)


async def scores(rig: Rig, pending: ShmPending) -> list[float]:
    rows = await rig.rows(pending)
    assert rows[0] == [0]
    return [score for (score,) in rows[1:]]


@in_rig(budget=SMALL)
async def test_query_runs_once_whatever_the_number_of_steps(rig: Rig) -> None:
    worker, runner = start(rig)
    documents = [[number % 7] * (1 + number % 9) for number in range(300)]
    pending = ask(rig, [2] * 5, *documents)
    await rig.serve(worker)

    assert await scores(rig, pending) == [10 * sum(ids) for ids in documents]
    assert runner.num_queries == 1
    assert len(runner.steps) > 75
    assert max(sum(len(ids) for ids, _ in step) for step in runner.steps if len(step) > 1) <= 8


@in_rig()
async def test_lone_request_is_one_step(rig: Rig) -> None:
    worker, runner = start(rig)
    pending = ask(rig, [3], [1], [2])
    await rig.serve(worker)

    assert await scores(rig, pending) == [3, 6]
    assert runner.steps == [[([3], True), ([1], False), ([2], False)]]


@in_rig(budget=SMALL)
async def test_requests_share_steps_and_keep_their_own_query(rig: Rig) -> None:
    worker, runner = start(rig)
    asked = [
        ([number + 1] * (1 + number % 5), [[token] * (1 + token % 3) for token in range(5)]) for number in range(6)
    ]
    requests = [ask(rig, query, *documents) for query, documents in asked]
    await rig.serve(worker)

    for pending, (query, documents) in zip(requests, asked, strict=True):
        assert await scores(rig, pending) == [sum(query) * sum(ids) for ids in documents]
    assert runner.num_queries == 6


@in_rig(budget=SMALL)
async def test_document_without_a_vector_fails_its_own_request_only(rig: Rig) -> None:
    worker, _ = start(rig)
    good, bad, other = ask(rig, [1], [2]), ask(rig, [1], [2], [MISSING]), ask(rig, [3], [4])
    await rig.serve(worker)

    assert (await scores(rig, good), await scores(rig, other)) == ([2], [12])
    error = await rig.error(bad)
    assert isinstance(error, Internal)
    assert (error.message, error.code) == ("Model 'late' produced non-finite scores", "INFERENCE_ERROR")


@in_rig()
async def test_output_that_the_model_lacks_is_refused(rig: Rig) -> None:
    worker, runner = start(rig)
    pending = ask(rig, [1], [2], compared=(("dense", 1.0),))
    await rig.serve(worker)

    assert isinstance(await rig.error(pending), BadRequest)
    assert runner.steps == []


@in_rig(budget=SMALL)
async def test_request_without_room_runs_whole_and_its_query_first_when_there_is_some(rig: Rig) -> None:
    worker, runner = start(rig)
    worker.build = type(worker.runners["m"])
    worker.load("wide")
    rig.tell("wide", workers=(worker.slot,))
    unread = [rig.submit([i], model="wide") for i in (1, 2, 3)]
    await rig.serve(worker)
    (link,) = worker.loop._links.values()
    rest = []
    while (lease := link.lease(4096)) is not None:
        rest.append(lease)
    pending = ask(rig, [2] * 6, *[[token] for token in range(9)])  # its query is longer than its documents
    worker.turn()
    assert runner.steps == []
    for lease in rest:
        lease.end()
    worker.turn()  # a document that was left in the queue would find room now, and no query
    for number, other in enumerate(unread, 1):
        assert await rig.rows(other) == [checksum([number], 65536)]
    await rig.serve(worker)

    assert await scores(rig, pending) == [12 * token for token in range(9)]
    assert runner.num_queries == 1


@in_rig(budget=SMALL)
async def test_request_that_is_cancelled_stops_between_its_steps(rig: Rig) -> None:
    worker, runner = start(rig)
    pending = ask(rig, [1], *[[2]] * 50)
    worker.turn(2)
    rig.engine.abandon(pending, Overloaded("gave up"))
    await rig.serve(worker)

    assert isinstance(await rig.error(pending), Overloaded)
    assert len(runner.steps) <= 2


@in_rig(budget=SMALL)
async def test_thousand_documents_do_not_hold_up_another_model(rig: Rig) -> None:
    worker, runner = start(rig)
    many = ask(rig, [1], *[[1, 1]] * 1000)
    worker.turn(3)
    num_before = len(runner.steps)
    lone = rig.submit([5])
    while not worker.runners["m"].steps:
        worker.turn()
    assert len(runner.steps) <= num_before + 1
    await rig.settle()
    assert await rig.rows(lone) == [checksum([5])]
    await rig.serve(worker)
    assert await scores(rig, many) == [2] * 1000


@pytest.mark.parametrize(("expand_to", "cost"), [(0, 3), (6, 6)])
def test_query_costs_what_the_runner_makes_of_it(expand_to: int, cost: int) -> None:
    @in_rig(budget=SMALL)
    async def run(rig: Rig) -> None:
        late = LateInteraction(expand_to=expand_to)
        worker, runner = start(
            rig, ModelCard(id="late", kind="encoder", outputs=LATE.outputs, dims=LATE.dims, late=late)
        )
        pending = ask(rig, [1] * 3, [1] * 2, [1] * 2, [1] * 2)
        await rig.serve(worker)
        assert [len(step) for step in runner.steps] == ([3, 1] if cost == 3 else [2, 2])
        assert await scores(rig, pending) == [6, 6, 6]

    run()
