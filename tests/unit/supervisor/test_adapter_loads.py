"""The supervisor's messages to its children about adapters."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.config.settings import Settings
from sie.ipc import messages
from sie.ipc.messages import AdapterReport, LoadAdapter, ModelEntry, ModelReport, UnloadAdapter
from sie.runtime.progress import Progress
from sie.supervisor import adapter_loads as module
from sie.supervisor.adapter_loads import AdapterLoads
from sie.supervisor.child import Child
from sie.supervisor.devices import WorkerSlot
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import Internal, WireError, to_wire

LOCAL, OTHER = (AdapterSpec(model="m", id=name, directory=f"/{name}") for name in "ab")
REMOTE = AdapterSpec(model="m", id="org/r", revision="v1")


class Desk:
    """Two workers and what each heard; `fetched` is what the prepare helper answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        defaults = Settings()
        models = msgspec.structs.replace(defaults.models, max_loras=1, load_timeout_s=100.0)
        self.fetched: str | WireError = "/cache/r"
        self.reconfigured: list[Settings] = []
        preparer = SimpleNamespace(fetch_adapter=self._fetch, reconfigure=self.reconfigured.append)
        monkeypatch.setattr(module, "Preparer", lambda *_args: preparer)
        self.workers = [Child("worker", slot, WorkerSlot("cpu")) for slot in range(2)]
        self.heard: list[tuple[int, Any]] = []
        self.num_broadcasts = 0
        self.tasks: list[asyncio.Task[None]] = []
        progress = Progress(io.StringIO(), "json")
        settings = msgspec.structs.replace(defaults, models=models)
        children: Any = self  # it can send
        specs = [LOCAL, OTHER, REMOTE]
        self.loads = AdapterLoads(settings, specs, children, self._broadcast, progress=progress, spawn=self._spawn)

    def send(self, child: Child, message: Any) -> None:
        self.heard.append((child.slot, message))

    def send_all(self, children: list[Child], message: Any) -> None:
        for child in children:
            self.send(child, message)

    def take(self) -> list[tuple[int, Any]]:
        heard, self.heard = self.heard, []
        return heard

    def model(self, state: Any, *slots: int) -> None:
        for slot in slots:
            self.loads.on_model(self.workers[slot], ModelReport("m", state))

    def adapter(self, name: str, state: Any, slot: int, **details: Any) -> None:
        self.loads.report(self.workers[slot], AdapterReport("m", name, state, **details))

    def states(self) -> dict[str, str]:
        [entry] = self.loads.entries((ModelEntry(card=ModelCard(id="m", kind="encoder"), state="loaded"),))
        return {name: adapter.state for name, adapter in entry.adapters.items()}

    async def _fetch(self, spec: AdapterSpec) -> str | WireError:
        assert spec == REMOTE
        return self.fetched

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    def _broadcast(self) -> None:
        self.num_broadcasts += 1


def at_desk(test: Callable[[Desk], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    async def main(monkeypatch: pytest.MonkeyPatch) -> None:
        await test(Desk(monkeypatch))

    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        asyncio.run(main(monkeypatch))

    return run


@at_desk
async def test_wanted_adapter_is_loaded_where_its_model_is(desk: Desk) -> None:
    desk.model("loaded", 1)
    desk.loads.want("m", "a")
    desk.loads.want("m", "a")
    assert desk.take() == [(1, LoadAdapter(LOCAL))]
    assert desk.num_broadcasts == 1


@at_desk
async def test_worker_that_gets_the_model_later_gets_its_adapters_behind_it(desk: Desk) -> None:
    desk.model("loaded", 0)
    desk.loads.want("m", "a")
    desk.adapter("a", "loaded", 0)
    desk.take()
    desk.model("loading", 1)
    assert desk.take() == []
    desk.model("loaded", 1)
    assert desk.take() == [(1, LoadAdapter(LOCAL))]


@at_desk
async def test_successor_of_a_dead_worker_gets_the_adapters_again(desk: Desk) -> None:
    desk.model("loaded", 0)
    desk.loads.want("m", "a")
    desk.adapter("a", "loaded", 0)
    desk.take()
    desk.loads.forget_worker(0)
    assert desk.states()["a"] == "loading"
    desk.model("loaded", 0)
    assert desk.take() == [(0, LoadAdapter(LOCAL))]


@at_desk
async def test_adapter_over_max_loras_is_unloaded_everywhere(desk: Desk) -> None:
    desk.model("loaded", 0, 1)
    for name in "ab":
        desk.loads.want("m", name)
    desk.adapter("a", "loaded", 0)
    desk.take()
    desk.adapter("b", "loaded", 0)
    assert desk.take() == [(0, UnloadAdapter("m", "a")), (1, UnloadAdapter("m", "a"))]
    assert desk.states() == {"a": "available", "b": "loaded", "org/r": "available"}
    desk.adapter("a", "loaded", 1)
    assert (1, UnloadAdapter("m", "a")) in desk.take(), "it had still been loading there"


@at_desk
async def test_adapters_end_with_the_model_they_belong_to(desk: Desk) -> None:
    desk.model("loaded", 0)
    desk.loads.want("m", "a")
    desk.adapter("a", "loaded", 0)
    desk.model("unloading", 0)
    assert desk.states()["a"] == "loading", "a model that unloads may yet stay"
    desk.model("available", 0)
    assert desk.states()["a"] == "available"
    desk.take()
    desk.model("loaded", 0)
    assert desk.take() == []


@at_desk
async def test_hub_adapter_is_fetched_before_it_is_loaded(desk: Desk) -> None:
    desk.model("loaded", 0)
    desk.loads.want("m", "org/r")
    assert desk.take() == []
    await asyncio.gather(*desk.tasks)
    assert desk.take() == [(0, LoadAdapter(msgspec.structs.replace(REMOTE, directory="/cache/r")))]


@at_desk
async def test_hub_adapter_that_cannot_be_fetched_has_failed(desk: Desk) -> None:
    desk.fetched = to_wire(Internal("no such repository"))
    desk.model("loaded", 0)
    desk.loads.want("m", "org/r")
    await asyncio.gather(*desk.tasks)
    assert desk.take() == []
    assert desk.states()["org/r"] == "failed"
    assert desk.num_broadcasts == 2


@at_desk
async def test_load_that_takes_too_long_is_given_up(desk: Desk) -> None:
    desk.model("loaded", 0)
    desk.loads.want("m", "a")
    desk.loads.tick(asyncio.get_running_loop().time() + 60.0)
    assert desk.states()["a"] == "loading"
    desk.loads.tick(asyncio.get_running_loop().time() + 101.0)
    assert desk.states()["a"] == "failed"


@at_desk
async def test_reloaded_settings_count_for_the_next_loads(desk: Desk) -> None:
    models = msgspec.structs.replace(Settings().models, load_timeout_s=10.0, load_retry_s=1.0)
    settings = msgspec.structs.replace(Settings(), models=models)
    desk.loads.reconfigure(settings)
    assert desk.reconfigured == [settings]
    desk.model("loaded", 0)
    desk.loads.want("m", "a")
    now_s = asyncio.get_running_loop().time()
    desk.loads.tick(now_s + 11.0)
    assert desk.states()["a"] == "failed"
    desk.loads.want("m", "b")
    desk.adapter("b", "failed", 0, error=to_wire(Internal("it broke")))
    assert desk.loads._registry.want("m", "b", now_s + 15.0) is not None


@at_desk
async def test_adapter_of_an_unloaded_model_is_not_late_and_loads_after_the_model(desk: Desk) -> None:
    desk.loads.want("m", "a")  # the request and the model's eviction crossed
    desk.loads.tick(asyncio.get_running_loop().time() + 101.0)
    assert desk.states()["a"] == "loading"
    desk.model("loaded", 0)
    assert desk.take() == [(0, LoadAdapter(LOCAL))]
    desk.loads.tick(asyncio.get_running_loop().time() + 160.0)
    assert desk.states()["a"] == "loading", "its time begins with the model's"
    desk.loads.tick(asyncio.get_running_loop().time() + 240.0)
    assert desk.states()["a"] == "failed"


@at_desk
async def test_models_without_adapters_are_passed_on_as_they_are(desk: Desk) -> None:
    entry = messages.ModelEntry(card=ModelCard(id="n", kind="encoder"), state="loaded")
    assert desk.loads.entries((entry,))[0] is entry
