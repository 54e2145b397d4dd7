"""Steps that begin before the one before has been read; see `tests/unit/engine_rig.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sie.ipc import messages
from sie.values.errors import BadRequest, Internal, NonFinite, Overloaded, WorkerLost
from sie.workers.device.faults import DeviceLostError
from sie.workers.model_api import RowStep, StepOutputs
from sie.workers.scheduling.waiting import Budget
from tests.unit.engine_rig import Rig, SumRunner, Worker, checksum, in_rig

TWO_ITEMS = Budget(max_tokens=1000, max_items=2, max_age_ns=10**12)


class AheadRunner(SumRunner):
    """Compute a step when it is read, as a device that takes its time; events has what happened to which tokens."""

    works_ahead = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.events: list[tuple[str, list[list[int]]]] = []
        self.refuses: dict[int, Exception] = {}
        """Errors of the launch itself, by first token id."""

    def launch(self, step: RowStep) -> Callable[[], StepOutputs] | None:
        items = [ids.tolist() for ids in step.inputs]
        if [9] in items:
            return None
        for ids in items:
            if ids[0] in self.refuses:
                raise self.refuses[ids[0]]
        self.events.append(("begin", items))

        def read() -> StepOutputs:
            self.events.append(("read", items))
            return self.run(step)

        return read

    def run(self, step: RowStep) -> StepOutputs:
        for ids in step.inputs:
            if ids[0] in self.refuses:
                raise self.refuses[ids[0]]
        return super().run(step)


def start(rig: Rig, frontend_pid: int | None = None) -> tuple[Worker, AheadRunner]:
    worker = rig.start_worker(attach=False)
    worker.build = AheadRunner
    worker.load("m")
    rig.tell("m", workers=(0,))
    rig.attach(worker, frontend_pid=frontend_pid)
    return worker, worker.runners["m"]


@in_rig(budget=TWO_ITEMS)
async def test_a_full_step_begins_before_the_one_before_is_read(rig: Rig) -> None:
    worker, runner = start(rig)
    requests = [rig.submit([i]) for i in range(1, 7)]
    await rig.serve(worker)

    one, two, three = [[1], [2]], [[3], [4]], [[5], [6]]
    assert runner.events == [
        ("begin", one), ("begin", two), ("read", one), ("read", two), ("begin", three), ("read", three)
    ]  # fmt: skip
    for i, pending in enumerate(requests, 1):
        assert await rig.rows(pending) == [checksum([i])]


@in_rig(budget=TWO_ITEMS)
async def test_a_step_with_a_part_of_a_request_is_full(rig: Rig) -> None:
    worker, runner = start(rig)
    pending = rig.submit([1], [2], [3], [4], [5])
    await rig.serve(worker)

    one, two, three = [[1], [2]], [[3], [4]], [[5]]
    assert runner.events == [
        ("begin", one), ("begin", two), ("read", one), ("read", two), ("begin", three), ("read", three)
    ]  # fmt: skip
    assert await rig.rows(pending) == [checksum([i]) for i in range(1, 6)]


@in_rig(budget=TWO_ITEMS)
async def test_a_step_that_has_to_run_whole_waits_for_the_one_before(rig: Rig) -> None:
    worker, runner = start(rig)
    requests = [rig.submit([i]) for i in (1, 2, 9, 3, 4)]
    await rig.serve(worker)

    assert runner.events == [("begin", [[1], [2]]), ("read", [[1], [2]]), ("begin", [[4]]), ("read", [[4]])]
    assert worker.ran == [[[1], [2]], [[9], [3]], [[4]]]
    for i, pending in zip((1, 2, 9, 3, 4), requests, strict=True):
        assert await rig.rows(pending) == [checksum([i])]


@in_rig()
async def test_a_step_that_may_still_grow_waits_for_the_one_before(rig: Rig) -> None:
    worker, runner = start(rig)
    first = rig.submit([1])
    worker.turn()
    assert runner.events == [("begin", [[1]])]
    second = rig.submit([2])
    worker.turn()
    third = rig.submit([3])
    await rig.serve(worker)

    assert runner.events == [("begin", [[1]]), ("read", [[1]]), ("begin", [[2], [3]]), ("read", [[2], [3]])]
    for i, pending in enumerate((first, second, third), 1):
        assert await rig.rows(pending) == [checksum([i])]


@in_rig(budget=TWO_ITEMS)
async def test_the_page_names_both_steps_under_way_and_then_what_is_left(rig: Rig) -> None:
    worker, runner = start(rig)
    seen = []
    runner.on_step = lambda: seen.append(worker.page.read())
    requests = [rig.submit([i]) for i in range(1, 6)]
    worker.turn(2)
    left = worker.page.read()
    await rig.serve(worker)

    ids = [pending.request_id for pending in requests]
    assert sorted(entry.request_id for entry in seen[0].entries) == ids[:4]
    assert seen[0].num_tokens == 4
    assert left.phase == "step"
    assert sorted(entry.request_id for entry in left.entries) == ids[2:4]
    assert sorted(entry.request_id for entry in seen[1].entries) == ids[2:4]
    assert worker.page.read().phase == "idle"
    for pending in requests:
        await rig.rows(pending)


@in_rig(budget=TWO_ITEMS)
async def test_a_step_that_fails_when_it_is_read_fails_nobody_else(rig: Rig) -> None:
    worker, runner = start(rig)
    runner.raises = {2: RuntimeError("secret"), 3: BadRequest("token 3 is out of range")}
    requests = [rig.submit([i]) for i in range(1, 7)]
    await rig.serve(worker)

    assert isinstance(await rig.error(requests[1]), Internal)
    assert str(await rig.error(requests[2])) == "token 3 is out of range"
    for i in (1, 4, 5, 6):
        assert await rig.rows(requests[i - 1]) == [checksum([i])]


@in_rig(budget=TWO_ITEMS)
async def test_a_step_that_cannot_begin_fails_nobody_else(rig: Rig) -> None:
    worker, runner = start(rig)
    runner.refuses = {3: BadRequest("token 3 is out of range")}
    requests = [rig.submit([i]) for i in range(1, 7)]
    await rig.serve(worker)

    assert str(await rig.error(requests[2])) == "token 3 is out of range"
    for i in (1, 2, 4, 5, 6):
        assert await rig.rows(requests[i - 1]) == [checksum([i])]


@in_rig(budget=TWO_ITEMS)
async def test_a_model_pays_for_a_step_that_cannot_begin(rig: Rig) -> None:
    worker, runner = start(rig)
    runner.refuses = {1: BadRequest("token 1 is out of range")}
    pending = rig.submit([1])
    await rig.serve(worker)

    assert isinstance(await rig.error(pending), BadRequest)
    assert worker.loop._state.served_ns["m"] > 0


@in_rig(budget=TWO_ITEMS)
async def test_no_memory_for_a_step_that_begins_ahead_makes_it_smaller(rig: Rig) -> None:
    worker, runner = start(rig)
    requests = [rig.submit([i]) for i in range(1, 7)]
    begin, is_first = runner.launch, [False, True]

    def launch(step: RowStep) -> Callable[[], StepOutputs] | None:
        if is_first and is_first.pop():
            raise MemoryError
        return begin(step)

    runner.launch = launch  # type: ignore[method-assign]  # the second launch has no memory
    is_first.reverse()
    await rig.serve(worker)

    for i, pending in enumerate(requests, 1):
        assert await rig.rows(pending) == [checksum([i])]
    assert [[3]] in worker.ran


@in_rig(budget=TWO_ITEMS)
async def test_a_request_that_failed_in_one_step_gets_nothing_of_the_next(rig: Rig) -> None:
    """Its reply's memory is another's by then."""
    worker, runner = start(rig)
    runner.raises = {2: BadRequest("token 2 is out of range")}
    failed, other = rig.submit([1], [2], [3]), rig.submit([4])
    last = rig.submit([5], [6], [7])
    await rig.serve(worker)

    assert str(await rig.error(failed)) == "token 2 is out of range"
    assert await rig.rows(other) == [checksum([4])]
    assert await rig.rows(last) == [checksum([5]), checksum([6]), checksum([7])]


@in_rig(budget=TWO_ITEMS)
async def test_a_request_given_up_while_a_step_of_it_is_under_way(rig: Rig) -> None:
    worker, runner = start(rig)
    gone, other = rig.submit([1], [2], [3], [4]), rig.submit([5])
    worker.turn()
    rig.engine.abandon(gone, Overloaded("its client left"))
    await rig.settle()
    await rig.serve(worker)

    assert runner.events[0] == ("begin", [[1], [2]])
    assert await rig.rows(other) == [checksum([5])]
    assert isinstance(await rig.error(gone), Overloaded)


@in_rig(budget=TWO_ITEMS)
async def test_a_suspect_runs_beside_no_other_step(rig: Rig) -> None:
    worker, runner = start(rig)
    first = [rig.submit([i]) for i in range(1, 4)]
    worker.poll()
    for item in worker.loop._state.queues["m"]:
        item.alone = item.request.inputs[0][0] == 3
    await rig.serve(worker)

    assert runner.events == [("begin", [[1], [2]]), ("read", [[1], [2]])], "the third ran whole"
    for i, pending in enumerate(first, 1):
        assert await rig.rows(pending) == [checksum([i])]


@in_rig(budget=TWO_ITEMS)
async def test_a_lost_device_leaves_the_requests_of_both_steps_on_the_page(rig: Rig) -> None:
    worker, runner = start(rig)
    requests = [rig.submit([i]) for i in range(1, 7)]
    runner.raises = {1: DeviceLostError("the device is gone")}
    with pytest.raises(DeviceLostError):
        worker.turn(2)

    suspects = [entry.request_id for entry in worker.page.read().entries]
    assert sorted(suspects) == [pending.request_id for pending in requests[:4]]
    rig.die(worker, recovering=())
    rig.engine.fail_held()
    for pending in requests:
        assert isinstance(await rig.error(pending), WorkerLost)


@in_rig()
async def test_unload_waits_for_the_step_under_way(rig: Rig) -> None:
    worker, _ = start(rig)
    worker.heard()
    pending = rig.submit([1])
    worker.poll()
    worker.supervisor.send(messages.Unload("m"))
    worker.turn()
    assert worker.states() == [("m", "unloading")]
    await rig.serve(worker)

    assert worker.states() == [("m", "available")]
    assert await rig.rows(pending) == [checksum([1])]


@in_rig()
async def test_a_frontend_that_dies_beside_a_step_under_way_is_dropped_behind_it(rig: Rig) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    worker, runner = start(rig, frontend_pid=process.pid)
    pending = rig.submit([1])
    worker.turn()
    process.kill()
    await process.wait()
    worker.turn_until(lambda: not worker.loop._links)

    assert runner.events == [("begin", [[1]]), ("read", [[1]])]
    assert await rig.rows(pending) == [checksum([1])]
    rig.die(worker, recovering=())


@in_rig(budget=Budget(max_tokens=1000, max_items=1, max_age_ns=10**12))
async def test_an_answer_that_ends_with_an_error_fails_its_request_alone(rig: Rig) -> None:
    worker = rig.start_worker("m")
    runner = worker.runners["m"]
    run = runner.run

    def answer(step: RowStep) -> StepOutputs:
        return StepOutputs(generated=[NonFinite("not finite")]) if step.inputs[0][0] == 2 else run(step)

    runner.run = answer
    requests = [rig.submit([i]) for i in (1, 2, 3)]
    await rig.serve(worker)

    assert str(await rig.error(requests[1])) == "not finite"
    for i in (1, 3):
        assert await rig.rows(requests[i - 1]) == [checksum([i])]
