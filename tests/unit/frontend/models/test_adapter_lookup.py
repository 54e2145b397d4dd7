from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from sie.frontend.models.adapter_lookup import AdapterTable, workers_with
from sie.frontend.models.model_table import ModelTable
from sie.ipc.messages import AdapterEntry, ModelEntry, Models, Touch, WantAdapter
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, Internal, NotFound, Unavailable, WorkerLost, to_wire
from tests.unit.engine_rig import Rig, checksum, in_rig

LOADED = AdapterEntry(state="loaded", workers=(0,))
LOADING = AdapterEntry(state="loading")
AVAILABLE = AdapterEntry(state="available")


def entry(workers: tuple[int, ...] = (0,), **adapters: AdapterEntry) -> ModelEntry:
    return ModelEntry(card=ModelCard(id="m", kind="encoder"), state="loaded", workers=workers, adapters=adapters)


class Counter:
    """An adapter table, its model table and what it sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.asked: list[str] = []
        self.models = ModelTable(ThreadPoolExecutor(1), self.asked.append)
        self.table = AdapterTable(self.models, self.sent.append)

    def ask(self, known: ModelEntry, adapter: str = "a", wait_s: float = 0.0) -> ModelEntry:
        until_ns = time.monotonic_ns() + int(wait_s * 1e9) if wait_s else 0
        return asyncio.run(self.table.serving(known, adapter, until_ns))


@pytest.fixture
def counter() -> Counter:
    return Counter()


def test_adapter_of_a_worker_is_served_and_its_use_is_told_in_order(counter: Counter) -> None:
    known = entry(a=LOADED, b=LOADED)
    for name in "abab":
        assert counter.ask(known, name) is known
    counter.ask(known, "a")
    assert counter.sent == []
    assert counter.table.take_used() == (("m", "b"), ("m", "a"))
    assert counter.table.take_used() == ()


def test_first_request_reports_uses_before_it_starts_the_load(counter: Counter) -> None:
    counter.ask(entry(a=AVAILABLE, b=LOADED), "b")
    with pytest.raises(Unavailable, match="Adapter 'a' of model 'm' is loading; retry in 1 s") as caught:
        counter.ask(entry(a=AVAILABLE))
    assert (caught.value.code, caught.value.http_status, caught.value.retry_after_s) == ("LORA_LOADING", 503, 1)
    with pytest.raises(Unavailable):
        counter.ask(entry(a=AVAILABLE))
    assert counter.sent == [Touch((), (("m", "b"),)), WantAdapter("m", "a")]


def test_load_in_progress_is_not_requested_again(counter: Counter) -> None:
    with pytest.raises(Unavailable):
        counter.ask(entry(a=LOADING))
    assert counter.sent == []


def test_adapter_that_comes_back_with_its_worker_is_neither_asked_for_nor_refused(counter: Counter) -> None:
    known = entry((), a=AdapterEntry(state="loading", recovering=True))
    assert counter.ask(known) is known
    assert counter.sent == []


@pytest.mark.parametrize("error", [Internal("it does not fit"), BadRequest("no such layers")])
def test_failed_load_is_the_answer_and_may_be_tried_again(counter: Counter, error: Any) -> None:
    with pytest.raises(type(error), match=error.message):
        counter.ask(entry(a=AdapterEntry(state="failed", error=to_wire(error))))
    assert counter.sent[-1] == WantAdapter("m", "a")


def test_wait_for_an_adapter_brings_back_a_model_that_went_meanwhile(counter: Counter) -> None:
    gone = msgspec.structs.replace(entry(workers=(), a=AVAILABLE), state="available")
    counter.models.update(Models((gone,), ready=True))

    async def main() -> ModelEntry:
        waiting = asyncio.ensure_future(counter.table.serving(entry(a=LOADING), "a", time.monotonic_ns() + 5 * 10**9))
        await asyncio.sleep(0)
        counter.models.update(Models((gone,), ready=True))
        for _ in range(10):
            await asyncio.sleep(0)
        assert counter.asked == ["m"]
        counter.models.update(Models((entry(a=LOADED),), ready=True))
        return await waiting

    assert asyncio.run(main()).workers == (0,)


def test_wait_for_an_adapter_of_a_removed_model_ends_at_once(counter: Counter) -> None:
    counter.models.update(Models((entry(a=LOADING),), ready=True))

    async def main() -> ModelEntry:
        asyncio.get_running_loop().call_soon(counter.models.update, Models((), ready=True))
        async with asyncio.timeout(5):
            return await counter.table.serving(entry(a=LOADING), "a", time.monotonic_ns() + 120 * 10**9)

    with pytest.raises(NotFound, match="Model 'm' not found"):
        asyncio.run(main())


def test_adapter_that_nobody_declared_is_refused_by_name(counter: Counter) -> None:
    with pytest.raises(
        BadRequest,
        match=r"Adapter '/etc' of model 'm' not found; the setting 'lora' declares: \['a'\].*options\.lora_id",
    ):
        counter.table.check_declared(entry(a=LOADED), "/etc")
    with pytest.raises(BadRequest, match="Model 'm' has no adapters"):
        counter.table.check_declared(entry(), "a")


def test_route_that_waits_gets_the_adapter_as_soon_as_it_is_there(counter: Counter) -> None:
    async def main() -> ModelEntry:
        waiting = asyncio.ensure_future(
            counter.table.serving(entry(a=AVAILABLE), "a", time.monotonic_ns() + 60_000_000_000)
        )
        for known in (entry(a=LOADING), entry(a=LOADED)):
            await asyncio.sleep(0)
            assert not waiting.done()
            counter.models.update(Models((known,), ready=True))
        return await waiting

    assert asyncio.run(main()).adapters["a"] is LOADED


@pytest.mark.parametrize("state", ["available", "unloading"])
def test_model_that_goes_while_its_adapter_is_waited_for_is_loaded_again(counter: Counter, state: Any) -> None:
    async def main() -> ModelEntry:
        until_ns = time.monotonic_ns() + 60_000_000_000
        waiting = asyncio.ensure_future(counter.table.serving(entry(a=LOADING), "a", until_ns))
        gone = msgspec.structs.replace(entry((), a=AVAILABLE), state=state)
        for known in (gone, entry((), a=AVAILABLE), entry(a=LOADED)):
            await asyncio.sleep(0.01)
            counter.models.update(Models((known,), ready=True))
        return await waiting

    assert asyncio.run(main()).adapters["a"] is LOADED
    assert "m" in counter.asked, "the model was asked for"


def test_route_that_waits_hears_of_the_load_at_its_deadline(counter: Counter) -> None:
    counter.models.update(Models((entry(a=LOADING),), ready=True))
    with pytest.raises(Unavailable, match="is loading"):
        counter.ask(entry(a=LOADING), wait_s=0.05)


def test_only_workers_with_the_adapter_may_get_its_work() -> None:
    known = entry((0, 1, 2), a=AdapterEntry(state="loaded", workers=(1, 2, 7)))
    assert workers_with(known, "a") == (1, 2)
    assert workers_with(known, "") == (0, 1, 2)
    assert workers_with(known, "gone") == ()


@in_rig()
async def test_work_of_a_dead_worker_waits_for_its_adapter(rig: Rig) -> None:
    """The model is there again before the adapter is; the work without one does not wait."""
    first = rig.start_worker("m")
    adapters = {"a": AdapterEntry(state="loaded", workers=(0,))}
    rig.entries["m"] = entry(a=adapters["a"])
    with_adapter, plain = rig.submit([1], lora="a"), rig.submit([2])
    first.is_dead = True
    rig.entries["m"] = entry((), a=LOADING)
    rig.engine.fail_over(0, first.generation, ())
    second = rig.start_worker("m", slot=1)
    rig.entries["m"] = entry((1,), a=LOADING)
    rig.engine.place_held()
    rig.engine.fail_held()
    await rig.serve(second)
    assert await rig.rows(plain) == [checksum([2])]
    assert not with_adapter.future.done()
    rig.entries["m"] = entry((1,), a=AdapterEntry(state="failed", error=to_wire(Internal("broken"))))
    rig.engine.fail_held()
    error = await rig.error(with_adapter)
    assert getattr(error, "code", "") == "LORA_LOADING"
    assert not isinstance(error, WorkerLost)
