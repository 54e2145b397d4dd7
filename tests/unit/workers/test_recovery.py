"""Steps that find no memory, and devices that are lost; in the step loop, attached to a real engine."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from sie.ipc import messages
from sie.metrics import definitions
from sie.shm.pages import CounterPage
from sie.values.errors import BadRequest, Internal, ResourceExhausted
from sie.workers.device import faults, memory
from sie.workers.device.faults import DeviceLostError, WornError, is_out_of_memory
from sie.workers.recovery import Recovery
from sie.workers.scheduling.ceilings import Ceiling, drop_outgrown, lower_ceiling
from sie.workers.scheduling.scheduler import State, plan_step
from sie.workers.scheduling.waiting import Budget, WaitingItem
from sie.workers.telemetry import WorkerMetrics
from tests.unit.engine_rig import Rig, SumRunner, card, checksum, in_rig
from tests.unit.workers.device.fake_cuda import FakeCuda

ASSERT = "CUDA error: device-side assert triggered"


class SmallRunner(SumRunner):
    """Find memory for at most `room` tokens in one step."""

    room = 4

    def run_tokens(self, token_ids: Any) -> Any:
        rows = super().run_tokens(token_ids)
        if sum(map(len, token_ids)) > self.room:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return rows


def start_small(rig: Rig, room: int) -> tuple[Any, SmallRunner]:
    worker = rig.start_worker(attach=False)
    worker.build = SmallRunner
    worker.load("m")
    rig.tell("m", workers=(0,))
    rig.attach(worker)
    worker.heard()
    runner = worker.runners["m"]
    runner.room = room
    return worker, runner


def failed_steps(runner: SmallRunner) -> list[list[list[int]]]:
    return [step for step in runner.steps if sum(map(len, step)) > runner.room]


def count(worker: Any, family: definitions.Family) -> float:
    return sum(record.value for record in worker.counters.records() if record.name == family.name)


@pytest.mark.parametrize("room", [1, 2, 3, 5, 8, 13])
def test_step_that_finds_no_memory_is_split_until_it_does(room: int) -> None:
    @in_rig()
    async def run(rig: Rig) -> None:
        worker, runner = start_small(rig, room)
        requests = [rig.submit([i]) for i in range(1, 17)]
        await rig.serve(worker)

        for i, pending in enumerate(requests, 1):
            assert await rig.rows(pending) == [checksum([i])]
        assert len(failed_steps(runner)) <= math.log2(16)
        assert sorted(ids for step in runner.steps if step not in failed_steps(runner) for ids in step) == [
            [i] for i in range(1, 17)
        ], "each ran to its end once"

    run()


@in_rig()
async def test_a_step_without_memory_beside_a_capture_is_split_and_memory_is_released_after_the_capture(
    rig: Rig,
) -> None:
    worker, _ = start_small(rig, 2)
    requests = [rig.submit([i]) for i in range(1, 9)]
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda(patch)
        with memory.keeping_cached():
            cuda.underway.append("a pool")
            await rig.serve(worker)
            for i, pending in enumerate(requests, 1):
                assert await rig.rows(pending) == [checksum([i])]
            cuda.underway.clear()
            assert cuda.num_released == 0
        assert cuda.num_released == 1
    assert not memory.is_worn()


@in_rig()
async def test_a_worn_worker_ends_once_nothing_waits_in_it(rig: Rig) -> None:
    worker = rig.start_worker("m")
    pending = rig.submit([1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_allocator", memory._Allocator())
        memory.wear_out("a test asks for it")
        worker.loop._periodic_ns = 0  # it is looked at once a second, before the step
        worker.turn()
        await rig.settle()
        assert await rig.rows(pending) == [checksum([1])]
        worker.loop._periodic_ns = 0
        with pytest.raises(WornError):
            worker.turn()


@pytest.mark.parametrize("num_items", [2, 8, 32])
def test_item_that_finds_no_memory_alone_fails_alone(num_items: int) -> None:
    @in_rig()
    async def run(rig: Rig) -> None:
        worker, runner = start_small(rig, num_items)
        small = [rig.submit([i]) for i in range(1, num_items)]
        large = rig.submit([7] * 100)
        await rig.serve(worker)

        for i, pending in enumerate(small, 1):
            assert await rig.rows(pending) == [checksum([i])]
        error = await rig.error(large)
        assert isinstance(error, ResourceExhausted)
        assert (error.code, error.http_status, error.retry_after_s) == ("RESOURCE_EXHAUSTED", 503, 5)
        assert "100 tokens" in error.message
        assert len(failed_steps(runner)) <= math.log2(num_items) + 1

    run()


@in_rig()
async def test_request_with_an_item_too_large_ends_and_its_other_items_do_not_run_for_nothing(rig: Rig) -> None:
    worker, runner = start_small(rig, 4)
    both = rig.submit([1] * 9, [2] * 10)
    other = rig.submit([3])
    await rig.serve(worker)

    assert isinstance(await rig.error(both), ResourceExhausted)
    assert await rig.rows(other) == [checksum([3])]
    assert [[2] * 10] not in runner.steps


@in_rig()
async def test_lone_item_is_tried_again_once_with_the_cache_given_back(rig: Rig) -> None:
    worker, runner = start_small(rig, 4)
    pending = rig.submit([1] * 5)
    worker.poll()
    runner.on_step = lambda: setattr(runner, "room", 5 if len(runner.steps) > 1 else 4)
    await rig.serve(worker)

    assert await rig.rows(pending) == [checksum([1] * 5)]
    assert len(runner.steps) == 2


@in_rig()
async def test_other_errors_of_a_split_step_stay_their_requests_own(rig: Rig) -> None:
    worker, runner = start_small(rig, 2)
    runner.raises = {8: BadRequest("token 8 is out of range")}
    good, bad, last = rig.submit([1]), rig.submit([8]), rig.submit([2] * 3)
    runner.raises = {}
    worker.poll()
    runner.on_step = lambda: runner.raises.update({8: BadRequest("token 8 is out of range")})
    await rig.serve(worker)

    assert str(await rig.error(bad)) == "token 8 is out of range"
    assert await rig.rows(good) == [checksum([1])]
    assert isinstance(await rig.error(last), ResourceExhausted)


@in_rig()
async def test_failed_step_s_tensors_are_gone_when_the_next_one_runs(rig: Rig) -> None:
    worker, runner = start_small(rig, 4)
    alive: list[int] = []
    tensors: weakref.WeakSet[Any] = weakref.WeakSet()

    class Tensor:
        pass

    def run_tokens(token_ids: Any) -> Any:
        alive.append(len(tensors))
        tensor = Tensor()
        tensors.add(tensor)
        return SmallRunner.run_tokens(runner, token_ids)

    runner.run_tokens = run_tokens  # type: ignore[method-assign]
    requests = [rig.submit([i]) for i in range(1, 9)]
    await rig.serve(worker)

    for pending in requests:
        await rig.rows(pending)
    assert alive == [0, 0, 0]


@in_rig()
async def test_recovery_is_counted_and_asks_for_another_model_s_memory_once_a_step(rig: Rig) -> None:
    worker, _runner = start_small(rig, 2)
    requests = [rig.submit([i]) for i in range(1, 9)]
    await rig.serve(worker)
    for pending in requests:
        await rig.rows(pending)
    assert [message for message in worker.heard() if isinstance(message, messages.MemoryShort)] == [
        messages.MemoryShort("m")
    ]
    counted = {family.name: count(worker, family) for family in definitions.FAMILIES if "_oom_" in family.name}
    assert counted == {
        "sie_oom_recoveries_attempted_total": 1, "sie_oom_recoveries_succeeded_total": 1,
        "sie_oom_terminal_failures_total": 0, "sie_oom_cache_clears_total": 2, "sie_oom_batch_splits_total": 2,
        "sie_oom_evictions_triggered_total": 0,
    }  # fmt: skip
    lost = rig.submit([1] * 3)
    await rig.serve(worker)
    assert isinstance(await rig.error(lost), ResourceExhausted)
    assert (count(worker, definitions.OOM_ATTEMPTED), count(worker, definitions.OOM_FAILED)) == (2, 1)


@in_rig()
async def test_later_steps_stay_below_what_failed(rig: Rig) -> None:
    worker, runner = start_small(rig, 5)
    for _ in range(2):
        requests = [rig.submit([i]) for i in range(1, 17)]
        await rig.serve(worker)
        for pending in requests:
            await rig.rows(pending)

    assert len(failed_steps(runner)) == 2, "16 and 8 tokens, and in the second round none"


# --- ceilings ------------------------------------------------------------------------------------------------------------

MINUTE_NS = 60 * 10**9


def test_ceiling_is_half_of_what_failed_and_never_rises_by_a_failure():
    first = lower_ceiling(None, 1000, 0)
    assert first.max_tokens(0) == 500
    assert lower_ceiling(first, 400, 0).max_tokens(0) == 200
    assert lower_ceiling(first, 1200, 0).max_tokens(0) == 500
    assert lower_ceiling(None, 1, 0).max_tokens(0) == 1


def test_ceiling_grows_back_steadily_and_goes_when_it_no_longer_matters():
    ceilings = {"m": Ceiling(100, 0)}
    values = [ceilings["m"].max_tokens(minute * MINUTE_NS // 2) for minute in range(5)]
    assert values == [100, 150, 200, 300, 400]
    assert Ceiling(100, 0).max_tokens(10**18) > 1 << 30, "and an old one does not overflow"
    drop_outgrown(ceilings, 400, 2 * MINUTE_NS - 1)
    assert ceilings
    drop_outgrown(ceilings, 400, 2 * MINUTE_NS)
    assert not ceilings


def test_plan_keeps_a_model_s_steps_under_its_ceiling_and_others_under_the_budget():
    state = State()
    state.ceilings["m"] = Ceiling(3, 0)
    for model in "mn":
        for index in range(8):
            state.add(model, WaitingItem(object(), index, 1, 0, 10**18))
    budget = Budget(max_tokens=6, max_items=64, max_age_ns=10**9)
    sizes = {}
    for _ in range(2):
        step = plan_step(state, budget, 0)
        assert step is not None
        state.remove(step)
        state.charge(step.model, step.num_tokens)
        sizes[step.model] = step.num_tokens
    assert sizes == {"m": 3, "n": 6}


# --- lost devices --------------------------------------------------------------------------------------------------------


@contextmanager
def on_a_gpu(*, computes: bool) -> Iterator[None]:
    """Let errors of a GPU be settled by one that computes, or that does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "_device", "cuda:0")
        patch.setattr(faults, "_can_compute", lambda _device: computes)
        yield


@in_rig()
async def test_lost_device_ends_the_loop_with_nothing_answered_and_its_work_named(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.runners["m"].raises = {9: RuntimeError(ASSERT)}
    requests = [rig.submit([1]), rig.submit([9]), rig.submit([2])]
    with on_a_gpu(computes=False), pytest.raises(DeviceLostError):
        worker.turn()
    await rig.settle()

    assert len(worker.ran) == 1, "no further step"
    assert not any(pending.future.done() for pending in requests)
    page = worker.page.read()
    assert page.phase == "step"
    assert sorted(entry.request_id for entry in page.entries) == [pending.request_id for pending in requests]
    survivor = rig.start_worker("m", slot=1)
    suspects = tuple(entry.request_id for entry in page.entries)
    rig.die(worker, suspects=suspects)
    await rig.serve(survivor)
    for pending, ids in zip(requests, ([1], [9], [2]), strict=True):
        assert await rig.rows(pending) == [checksum(ids)]


@in_rig()
async def test_an_error_after_which_the_device_computes_fails_its_own_request_only(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.runners["m"].raises = {9: RuntimeError(ASSERT)}
    requests = [rig.submit([1]), rig.submit([9]), rig.submit([2])]
    with on_a_gpu(computes=True):
        await rig.serve(worker)
    for pending, ids in ((requests[0], [1]), (requests[2], [2])):
        assert await rig.rows(pending) == [checksum(ids)]
    with pytest.raises(Internal):
        await rig.rows(requests[1])


@pytest.mark.parametrize(
    ("text", "out_of_memory"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)  # fmt: skip
def test_errors_without_memory_are_told_apart(text, out_of_memory):
    assert is_out_of_memory(RuntimeError(text)) == out_of_memory
    assert is_out_of_memory(MemoryError())


def test_items_that_lead_run_no_later_than_those_that_follow_them():
    ran: list[list[int]] = []

    def attempt(_runner: Any, _card: Any, items: list[WaitingItem]) -> None:
        ran.append([item.index for item in items])
        if sum(item.num_tokens for item in items) > 9:
            raise MemoryError

    request = SimpleNamespace(ended=False)
    items = [WaitingItem(request, index, tokens, 0, 0, leads=index == 0) for index, tokens in enumerate((8, 3, 2, 1))]
    page = CounterPage.create(1 << 16)
    recovery = Recovery(
        attempt, ceilings={}, metrics=WorkerMetrics(page, "0"), retry_after_s=5, ask_for_memory=lambda _model: None
    )
    recovery.recover(SumRunner(card("m")), card("m"), items, MemoryError())
    page.close()
    assert ran[0][0] == 0
    assert sorted(index for step in ran for index in step) == [0, 1, 2, 3]
