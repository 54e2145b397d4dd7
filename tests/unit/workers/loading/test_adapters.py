"""The adapters of a worker, in its step loop and through a real engine; the model answers checksums."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from sie.ipc import messages
from sie.ipc.messages import AdapterEntry, AdapterReport
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import BadRequest, Internal, SieError, Unavailable
from sie.workers.loading import hosting
from sie.workers.model_api import RowStep, StepOutputs
from tests.unit.engine_rig import Rig, SumRunner, Worker, card, checksum, in_rig


class FakeAdapters(set[str]):
    """Adapters that `read` waits for until `gate` opens; `fault` is what a read ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.install_fault: SieError | None = None

    def read(self, spec: AdapterSpec) -> str:
        assert threading.current_thread() is not threading.main_thread()
        assert self.gate.wait(60.0)
        if self.fault is not None:
            raise self.fault
        return spec.id

    def install(self, name: str, weights: str) -> int:
        if self.install_fault is not None:
            raise self.install_fault
        assert weights == name
        self.add(name)
        return 17


class LoraRunner(SumRunner):
    """Adds 1000 to the rows of items that name an adapter, and remembers what each step named."""

    def __init__(self, model: ModelCard) -> None:
        super().__init__(model)
        self.adapters = FakeAdapters()
        self.loras: list[list[str]] = []

    def run(self, step: RowStep) -> StepOutputs:
        rows, loras = super().run_tokens(step.inputs), step.loras
        self.loras.append(list(loras))
        assert all(not lora or lora in self.adapters for lora in loras), "an adapter that a step names is there"
        return StepOutputs(
            rows + np.array([[1000.0 if lora else 0.0] for lora in loras or [""] * len(rows)], np.float32)
        )


def start(rig: Rig, *names: str) -> tuple[Worker, LoraRunner]:
    """Return a worker with model `m` and these adapters, of which the engine knows, too."""
    worker = rig.start_worker()
    worker.build = LoraRunner
    worker.load("m")
    rig.tell("m", workers=(0,))
    for name in names:
        load(worker, name)
        worker.turn_until(lambda name=name: name in worker.runners["m"].adapters)
    declared = {name: AdapterEntry(state="loaded", workers=(0,)) for name in (*names, "late")}
    rig.entries["m"] = msgspec.structs.replace(rig.entries["m"], adapters=declared)
    worker.heard()
    return worker, worker.runners["m"]


def load(worker: Worker, name: str, model: str = "m") -> None:
    worker.supervisor.send(messages.LoadAdapter(AdapterSpec(model=model, id=name, directory="/a")))
    worker.turn()


def reports(worker: Worker) -> list[AdapterReport]:
    return [message for message in worker.heard() if isinstance(message, AdapterReport)]


def until_reports(worker: Worker, *states: str) -> list[AdapterReport]:
    found: list[AdapterReport] = []

    def is_there() -> bool:
        found.extend(reports(worker))
        return len(found) >= len(states)

    worker.turn_until(is_there)
    assert [report.state for report in found] == list(states)
    return found


def adapted(ids: Sequence[int]) -> list[float]:
    return [value + 1000 for value in checksum(ids)]


@in_rig()
async def test_requests_of_several_adapters_share_a_step(rig: Rig) -> None:
    worker, runner = start(rig, "a", "b")
    pending = [rig.submit([1], [2], lora="a"), rig.submit([3]), rig.submit([4], lora="b")]
    await rig.serve(worker)
    assert await rig.rows(pending[0]) == [adapted([1]), adapted([2])]
    assert await rig.rows(pending[1]) == [checksum([3])]
    assert await rig.rows(pending[2]) == [adapted([4])]
    assert runner.loras == [["a", "a", "", "b"]]


@in_rig()
async def test_step_that_names_no_adapter_runs_as_if_there_were_none(rig: Rig) -> None:
    worker, runner = start(rig, "a")
    pending = rig.submit([3])
    await rig.serve(worker)
    assert await rig.rows(pending) == [checksum([3])]
    assert runner.loras == [[]]


@in_rig()
async def test_adapter_that_the_worker_lacks_is_a_matter_of_time(rig: Rig) -> None:
    worker, _ = start(rig, "a")
    pending = rig.submit([3], lora="late")
    await rig.serve(worker)
    error = await rig.error(pending)
    assert isinstance(error, Unavailable)
    assert (error.code, error.http_status, error.retry_after_s) == ("LORA_LOADING", 503, 1)


@in_rig()
async def test_load_is_reported_and_no_step_waits_for_it(rig: Rig) -> None:
    worker, runner = start(rig)
    runner.adapters.gate.clear()
    load(worker, "late")
    until_reports(worker, "loading")
    pending = rig.submit([3])
    await rig.serve(worker)
    assert await rig.rows(pending) == [checksum([3])]
    runner.adapters.gate.set()
    [report] = until_reports(worker, "loaded")
    assert (report.model, report.adapter, report.memory_bytes, report.error) == ("m", "late", 17, None)
    pending = rig.submit([3], lora="late")
    await rig.serve(worker)
    assert await rig.rows(pending) == [adapted([3])]


@in_rig()
async def test_evicted_adapter_stays_for_what_waits_and_takes_nothing_new(rig: Rig) -> None:
    worker, runner = start(rig, "a")
    first = rig.submit([1], lora="a")
    worker.poll()
    worker.supervisor.send(messages.UnloadAdapter("m", "a"))
    worker.poll()
    second = rig.submit([2], lora="a")
    worker.poll()
    assert "a" in runner.adapters
    await rig.serve(worker)
    assert await rig.rows(first) == [adapted([1])]
    assert getattr(await rig.error(second), "code", "") == "LORA_LOADING"
    assert "a" not in runner.adapters
    until_reports(worker, "unloading", "available")


@in_rig()
async def test_adapter_wanted_again_before_it_was_freed_stays(rig: Rig) -> None:
    worker, runner = start(rig, "a")
    pending = rig.submit([1], lora="a")
    worker.poll()
    worker.supervisor.send(messages.UnloadAdapter("m", "a"))
    worker.supervisor.send(messages.LoadAdapter(AdapterSpec(model="m", id="a", directory="/a")))
    await rig.serve(worker)
    assert await rig.rows(pending) == [adapted([1])]
    until_reports(worker, "unloading", "loaded")
    assert "a" in runner.adapters


@in_rig()
async def test_failed_load_is_reported_with_its_reason_and_harms_nobody(rig: Rig) -> None:
    worker, runner = start(rig, "a")
    faults = (BadRequest("no such layers"), RuntimeError("a secret"))
    for fault, kind, reason in zip(faults, ("BadRequest", "Internal"), ("no such layers", "RuntimeError"), strict=True):
        runner.adapters.fault = fault
        load(worker, "late")
        report = until_reports(worker, "loading", "failed")[-1]
        assert report.error is not None
        assert report.error.kind == kind
        assert reason in report.error.message
        assert "secret" not in report.error.message
    runner.adapters.fault, runner.adapters.install_fault = None, Internal("does not run")
    load(worker, "late")
    report = until_reports(worker, "loading", "failed")[-1]
    assert report.error is not None
    assert report.error.message == "does not run"
    pending = rig.submit([1], lora="a")
    await rig.serve(worker)
    assert await rig.rows(pending) == [adapted([1])]


@in_rig()
async def test_model_of_a_kind_without_adapters_says_so(rig: Rig) -> None:
    worker = rig.start_worker("m")
    worker.heard()
    load(worker, "late")
    [report] = until_reports(worker, "failed")
    assert report.error is not None
    assert (report.error.code, report.error.http_status) == ("INVALID_INPUT", 400)


@in_rig()
async def test_adapter_of_a_model_that_is_not_there_is_not_loaded(rig: Rig) -> None:
    worker, _ = start(rig)
    load(worker, "late", "gone")
    until_reports(worker, "available")


@in_rig()
async def test_adapter_read_for_a_model_that_was_loaded_anew_is_read_again(rig: Rig) -> None:
    worker, old = start(rig)
    old.adapters.gate.clear()
    load(worker, "late")
    worker.supervisor.send(messages.Unload("m"))
    worker.turn_until(lambda: worker.host.runner("m") is None and "m" not in worker.host.models)
    worker.load("m", card("m"))
    load(worker, "late")
    old.adapters.gate.set()
    worker.turn_until(lambda: "late" in worker.runners["m"].adapters)
    assert worker.runners["m"] is not old
    assert not old.adapters


@in_rig()
async def test_model_that_goes_while_an_adapter_is_read_is_freed_when_that_has_ended(rig: Rig) -> None:
    worker, runner = start(rig)
    runner.itself = runner  # type: ignore[attr-defined]  # a cycle, as modules of torch have them
    gone = weakref.ref(runner)
    gate = runner.adapters.gate
    gate.clear()
    load(worker, "late")
    worker.supervisor.send(messages.Unload("m"))
    worker.turn_until(lambda: "m" not in worker.host.models)
    del runner
    worker.runners.clear()
    assert gone() is not None, "the thread that reads has it"
    gate.set()
    until_reports(worker, "loading", "available")
    assert gone() is None


@in_rig()
async def test_adapters_that_wait_do_not_keep_a_model_that_goes(rig: Rig) -> None:
    worker, runner = start(rig)
    runner.itself = runner  # type: ignore[attr-defined]  # as above
    gone = weakref.ref(runner)
    gate = runner.adapters.gate
    gate.clear()
    load(worker, "late")
    load(worker, "later")
    worker.supervisor.send(messages.Unload("m"))
    worker.turn_until(lambda: "m" not in worker.host.models)
    del runner
    worker.runners.clear()
    gate.set()
    until_reports(worker, "loading", "loading", "available", "available")
    assert gone() is None


@in_rig()
async def test_nothing_holds_a_model_with_adapters_when_its_memory_is_freed(rig: Rig) -> None:
    worker, runner = start(rig, "a")
    gone = weakref.ref(runner)
    worker.runners.clear()
    del runner
    was_gone: list[bool] = []
    worker.supervisor.send(messages.Unload("m"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosting, "free_model", lambda: was_gone.append(gone() is None))
        worker.turn_until(lambda: "m" not in worker.host.models)
    assert was_gone == [True]


@in_rig()
async def test_a_thread_that_cannot_start_fails_the_load_and_not_the_worker(rig: Rig) -> None:
    def refuse(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    worker, runner = start(rig)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        load(worker, "late")
        assert until_reports(worker, "loading", "failed")[-1].error is not None
    load(worker, "late")
    until_reports(worker, "loading", "loaded")
    assert "late" in runner.adapters
