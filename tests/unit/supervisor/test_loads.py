"""The supervisor's messages to its children about models. A list of names stands for the children and records them."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sie.catalog.spec import ModelSpec
from sie.config.settings import Settings
from sie.ipc import messages
from sie.ipc.messages import ModelReport
from sie.runtime.progress import Progress
from sie.supervisor.child import Child
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.evictions import Memory
from sie.supervisor.loads import Loads
from sie.supervisor.model_registry import ModelRegistry
from sie.supervisor.state_broadcast import StateBroadcast
from sie.values.card import ModelCard, StubOptions
from sie.values.errors import Internal, WireError, to_wire
from sie.values.generate import GenerateRule

HALF_FREE = Memory(80 << 30, 40 << 30)


class FakeChildren:
    def __init__(self, devices: tuple[str, ...] = ("cpu", "cpu")) -> None:
        self.workers = [Child("worker", slot, WorkerSlot(device)) for slot, device in enumerate(devices)]
        for worker in self.workers:
            worker.channel = object()  # type: ignore[assignment]  # connected, and more is not asked
        self.frontends = [Child("frontend", 0, WorkerSlot(""))]
        self.heard: list[tuple[str, Any]] = []
        self.counted: list[tuple[str, ...]] = []
        self.failed: dict[str, bool] = {}
        self.page = self

    def show_failed(self, model: str, *, has_failed: bool) -> None:
        self.failed[model] = has_failed

    def count(self, family: Any, *labels: str) -> None:
        self.counted.append((family.name, *labels))

    def send(self, child: Child, message: Any, fds: Any = None) -> None:
        self.heard.append((child.name, message))

    def send_all(self, children: list[Child], message: Any) -> None:
        for child in children:
            self.send(child, message)

    def take(self) -> list[tuple[str, Any]]:
        heard, self.heard = self.heard, []
        return heard


class Office:
    """Loads with one preloaded model `p` and one lazy model `l`; `prepared` is what the prepare helper answers."""

    def __init__(
        self,
        idle_s: float = 0.0,
        devices: tuple[str, ...] = ("cpu", "cpu"),
        **changes: Any,
    ) -> None:
        defaults = Settings()
        models = msgspec.structs.replace(defaults.models, idle_unload_s=idle_s, load_timeout_s=100.0, **changes)
        settings = msgspec.structs.replace(defaults, models=models)
        self.prepared: ModelCard | WireError = card("l")
        self.children = FakeChildren(devices)
        self.registry = ModelRegistry(30.0)
        self.registry.add(ModelSpec(id="p"), True, card("p"))
        self.registry.add(ModelSpec(id="l"), False, None)
        self.tasks: list[asyncio.Task[None]] = []
        self.num_ready = 0
        self.not_ready = ""
        children: Any = self.children
        preparer: Any = SimpleNamespace(prepare=self._prepare, reconfigure=lambda _: None)
        self.state = StateBroadcast(self.registry, children, lambda: self.not_ready, self._on_ready)
        progress = Progress(io.StringIO(), "json")
        self.loads = Loads(settings, self.registry, children, self.state,
                           progress=progress, spawn=self._spawn, preparer=preparer)  # fmt: skip

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    def _on_ready(self) -> None:
        self.num_ready += 1

    async def _prepare(self, _spec: ModelSpec) -> ModelCard | WireError:
        return self.prepared

    def report(self, model: str, state: Any, slot: int = 0, **details: Any) -> None:
        self.loads.report(self.children.workers[slot], ModelReport(model, state, **details))

    async def broadcasts(self) -> list[messages.Models]:
        await asyncio.gather(*self.tasks)
        await asyncio.sleep(0)
        return [message for _, message in self.children.take() if isinstance(message, messages.Models)]


def card(model: str) -> ModelCard:
    return ModelCard(id=model, kind="encoder")


def generator(model: str) -> ModelCard:
    rule = GenerateRule(context_length=1 << 17, kv_token_bytes=1 << 10)
    return ModelCard(id=model, kind="generator", num_weights=1 << 30, generate=rule)


def in_office(**options: Any) -> Callable[[Callable[[Office], Any]], Callable[[], None]]:
    def decorate(test: Callable[[Office], Any]) -> Callable[[], None]:
        async def main() -> None:
            await test(Office(**options))

        def run() -> None:
            asyncio.run(main())

        return run

    return decorate


@in_office()
async def test_start_loads_what_readiness_waits_for_on_every_worker(office: Office) -> None:
    office.loads.start()
    assert office.children.take() == [
        ("worker-0", messages.Load(card("p"))),
        ("worker-1", messages.Load(card("p"))),
    ]


@in_office()
async def test_child_that_joins_gets_the_current_state(office: Office) -> None:
    office.loads.greet(office.children.workers[1])
    office.loads.greet(office.children.frontends[0])
    (worker, load), (frontend, models) = office.children.take()
    assert (worker, load) == ("worker-1", messages.Load(card("p")))
    assert (frontend, [entry.card.id for entry in models.entries]) == ("frontend-0", ["p", "l"])


@in_office()
async def test_hub_model_is_prepared_before_it_is_loaded(office: Office) -> None:
    office.loads.want("l")
    office.loads.want("l")
    assert [message for _, message in office.children.take() if isinstance(message, messages.Load)] == []
    await asyncio.gather(*office.tasks)
    assert [name for name, message in office.children.take() if message == messages.Load(card("l"))] == [
        "worker-0",
        "worker-1",
    ]
    assert len(office.tasks) == 1


def test_a_load_warns_of_settings_of_generation_without_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    @in_office()
    async def load(office: Office) -> None:
        rule = GenerateRule(context_length=8, unserved_settings=("num_beams", "stop_strings"))
        office.prepared = msgspec.structs.replace(card("l"), generate=rule)
        office.loads.want("l")
        await asyncio.gather(*office.tasks)

    load()
    assert "l: its generation_config.json sets what has no effect here: num_beams, stop_strings" in caplog.text


@in_office(devices=("cuda:0",))
async def test_a_generator_of_the_start_waits_for_the_sizes_of_the_others_and_leaves_them_memory(
    office: Office,
) -> None:
    worker, generators = office.children.workers[0], [generator("p"), generator("h")]
    office.registry.records["p"].card, office.prepared = generators
    office.registry.add(ModelSpec(id="h"), True, None)
    office.loads.take_memory(worker, HALF_FREE)
    office.loads.start()
    office.loads.take_memory(worker, HALF_FREE)
    assert sent(office) == []
    await asyncio.gather(*office.tasks)
    office.loads.take_memory(worker, HALF_FREE)
    rooms = [messages.CacheRoom(95.0, 2 * generators[0].num_weights, 0.5), messages.CacheRoom(95.0)]
    assert sent(office) == [("worker-0", messages.Load(generators[1], rooms[0]))]
    for state in ("loading", "loaded"):
        office.report("h", state)
    office.loads.take_memory(worker, HALF_FREE)
    assert sent(office) == [("worker-0", messages.Load(generators[0], rooms[1]))]


@in_office(devices=("cuda:0",))
async def test_a_generator_does_not_wait_for_one_that_cannot_be_prepared(office: Office) -> None:
    office.registry.records["p"].card = generator("p")
    office.prepared = to_wire(Internal("gated", extras={"error_class": "GATED"}))
    office.registry.add(ModelSpec(id="h"), True, None)
    office.loads.start()
    await asyncio.gather(*office.tasks)
    office.loads.take_memory(office.children.workers[0], HALF_FREE)
    assert sent(office) == [("worker-0", messages.Load(generator("p"), messages.CacheRoom(95.0)))]


@in_office()
async def test_model_that_cannot_be_prepared_has_failed(office: Office) -> None:
    office.prepared = to_wire(Internal("gated", extras={"error_class": "GATED"}))
    office.loads.want("l")
    models = (await office.broadcasts())[-1]
    assert [(entry.state, entry.error is not None) for entry in models.entries] == [
        ("loading", False),
        ("failed", True),
    ]


@in_office()
async def test_a_start_without_any_model_left_is_reported_with_the_errors(office: Office) -> None:
    lost: list[list[WireError]] = []
    office.loads.bind_lost_causes(lost.append)
    office.registry.remove("l")
    office.report("p", "failed", error=to_wire(Internal("slow", extras={"error_class": "NETWORK"})))
    assert lost == []
    office.report("p", "failed", error=to_wire(Internal("gated", extras={"error_class": "GATED"})))
    assert [[error.message for error in errors] for errors in lost] == [["gated"]]


@in_office()
async def test_progress_of_a_load_is_no_news_for_frontends(office: Office) -> None:
    office.report("p", "loading", progress=0.5, detail="reading")
    assert await office.broadcasts() == []


@in_office()
async def test_failed_preload_is_tried_again_after_its_cool_down(office: Office) -> None:
    office.loads.start()
    office.report("p", "failed", error=to_wire(Internal("broke")))
    office.children.take()
    retry_at_s = office.registry.records["p"].retry_at_s
    office.loads.tick(retry_at_s - 1)
    assert office.children.take() == []
    office.loads.tick(retry_at_s)
    assert [message for _, message in office.children.take()] == [messages.Load(card("p"))] * 2


@in_office()
async def test_load_over_its_time_fails_and_takes_its_worker_along(office: Office) -> None:
    killed: list[str] = []
    for worker in office.children.workers:
        worker.kill = lambda worker=worker: killed.append(worker.name)  # type: ignore[method-assign]
    office.report("p", "loading", slot=1, progress=0.0)
    since_s = office.registry.records["p"].loading_since_s[1]
    office.loads.tick(since_s + 99)
    assert killed == []
    office.loads.tick(since_s + 101)

    assert killed == ["worker-1"]
    error = office.registry.records["p"].error
    assert error is not None
    assert error.extras["error_class"] == "TIMEOUT"


@in_office(idle_s=10.0)
async def test_idle_lazy_model_is_unloaded_everywhere(office: Office) -> None:
    office.registry.want("l", 0.0)
    for slot in range(2):
        office.report("l", "loaded", slot=slot)
    used_s = office.registry.records["l"].last_used_s
    office.children.take()
    office.loads.tick(used_s + 9)
    assert office.children.take() == []
    office.loads.tick(used_s + 11)
    assert office.children.take() == [
        ("worker-0", messages.Unload("l")),
        ("worker-1", messages.Unload("l")),
    ]
    assert office.children.counted == [("sie_idle_evictions_total", "l")]


@in_office()
async def test_idle_model_stays_when_the_setting_says_never(office: Office) -> None:
    office.registry.want("l", 0.0)
    office.report("l", "loaded")
    office.children.take()
    office.loads.tick(1e9)
    assert not any(isinstance(message, messages.Unload) for _, message in office.children.take())


# --- reloading --------------------------------------------------------------------------------------------------------


@in_office()
async def test_replaced_models_come_and_go_and_readiness_waits_for_none(office: Office) -> None:
    office.report("p", "loaded")
    office.report("p", "loaded", slot=1)
    assert (await office.broadcasts())[-1].ready
    left = office.loads.replace([(ModelSpec(id="p"), True, card("p")), (ModelSpec(id="n"), True, card("n"))])
    heard = office.children.take()
    assert left == ()
    assert [message for name, message in heard if name == "worker-0"] == [
        messages.Load(card("n")), messages.Unload("l"),
    ]  # fmt: skip
    (models,) = await office.broadcasts()
    assert [(entry.card.id, entry.state) for entry in models.entries] == [("p", "loaded"), ("n", "loading")]
    assert models.ready
    assert office.state.num_loaded == 1


@in_office()
async def test_a_model_that_comes_lazily_loads_when_it_is_asked_for(office: Office) -> None:
    office.loads.replace([*known(), (ModelSpec(id="n"), False, card("n"))])
    assert office.children.take() == []
    office.loads.want("n")
    assert ("worker-0", messages.Load(card("n"))) in office.children.take()


@in_office(pinned=("n",))
async def test_models_that_come_are_pinned_as_at_a_start(office: Office) -> None:
    office.loads.replace([*known(), (ModelSpec(id="n"), False, card("n")), (ModelSpec(id="m"), True, card("m"))])
    assert {name: record.is_pinned for name, record in office.registry.records.items()} == {
        "p": True, "l": False, "n": True, "m": True,
    }  # fmt: skip
    models = msgspec.structs.replace(Settings().models, pinned=("l",))
    office.loads.reconfigure(msgspec.structs.replace(Settings(), models=models))
    office.loads.replace([*known(), (ModelSpec(id="n"), False, card("n"))])
    assert {name: record.is_pinned for name, record in office.registry.records.items()} == {
        "p": True, "l": True, "n": False,
    }  # fmt: skip


@in_office()
async def test_a_changed_source_waits_for_a_restart(office: Office) -> None:
    moved = ModelSpec(id="p", directory="/elsewhere")
    assert office.loads.replace([(moved, True, card("p")), known()[1]]) == ("the definition of model p",)
    assert office.registry.records["p"].spec.directory is None


@in_office()
async def test_a_model_removed_while_it_loads_is_not_kept(office: Office) -> None:
    office.loads.start()
    office.loads.replace(known()[1:])
    office.children.take()
    office.report("p", "loaded", slot=1)
    assert office.children.take() == [("worker-1", messages.Unload("p"))]


@in_office()
async def test_a_model_removed_while_it_is_fetched_is_not_loaded(office: Office) -> None:
    office.loads.want("l")
    office.loads.replace(known()[:1])
    office.children.take()
    await asyncio.gather(*office.tasks)
    assert [message for _, message in office.children.take() if isinstance(message, messages.Load)] == []


def known() -> list[tuple[ModelSpec, bool, ModelCard | None]]:
    return [(ModelSpec(id="p"), True, card("p")), (ModelSpec(id="l"), False, None)]


# --- on request ----------------------------------------------------------------------------------------------------------


def sent(office: Office) -> list[tuple[str, Any]]:
    """Return what the workers were told."""
    return [(name, message) for name, message in office.children.take() if name.startswith("worker")]


def everywhere(message: Any) -> list[tuple[str, Any]]:
    return [("worker-0", message), ("worker-1", message)]


def view(office: Office, model: str) -> str:
    return next(entry.state for entry in office.registry.entries() if entry.card.id == model)


def loaded_everywhere(office: Office, model: str, nbytes: int = 0) -> None:
    for slot in range(2):
        office.report(model, "loaded", slot, memory_bytes=nbytes)
    grow_old(office, model)


def grow_old(office: Office, model: str) -> None:
    """Let so much time pass that a model may be unloaded for another."""
    office.registry.records[model].loaded_s -= 60.0


def gone_everywhere(office: Office, model: str) -> None:
    for slot in range(2):
        office.report(model, "unloading", slot)
        office.report(model, "available", slot)


@in_office()
async def test_unload_on_request_takes_a_preloaded_model_out_of_readiness_until_it_is_loaded_again(
    office: Office,
) -> None:
    loaded_everywhere(office, "p")
    office.loads.manage("unload", "p")
    assert sent(office) == everywhere(messages.Unload("p"))
    assert view(office, "p") == "unloading"
    gone_everywhere(office, "p")
    assert (view(office, "p"), office.state.reason()) == ("available", "")
    office.loads.want("p")
    assert office.state.reason() == "", "a request loads it again, and readiness does not wait for that"
    loaded_everywhere(office, "p")
    for slot in range(2):
        office.loads.forget_worker(slot, blame=False)
    assert office.state.reason() == "not loaded: p (loading)"


@in_office()
async def test_load_on_request_forgets_the_cool_down_of_an_earlier_failure(office: Office) -> None:
    office.report("p", "failed", error=to_wire(Internal("broke", extras={"error_class": "CONFIG"})))
    sent(office)
    office.loads.want("p")
    assert sent(office) == []
    office.loads.manage("load", "p")
    office.loads.manage("load", "p")
    assert sent(office) == everywhere(messages.Load(card("p")))
    assert view(office, "p") == "loading"


@in_office()
async def test_reload_waits_until_the_model_has_gone_everywhere(office: Office) -> None:
    loaded_everywhere(office, "p")
    office.loads.manage("reload", "p")
    assert sent(office) == everywhere(messages.Unload("p"))
    office.report("p", "unloading", 0)
    office.report("p", "available", 0)
    office.loads.want("p")
    office.loads.tick(0.0)
    assert sent(office) == [], "a load now would only call the unload off"
    office.report("p", "unloading", 1)
    office.report("p", "available", 1)
    assert view(office, "p") == "loading"
    office.loads.tick(0.0)
    assert sent(office) == everywhere(messages.Load(card("p")))
    loaded_everywhere(office, "p")
    assert view(office, "p") == "loaded"


@in_office()
async def test_reload_of_a_model_whose_worker_dies_meanwhile_goes_on(office: Office) -> None:
    loaded_everywhere(office, "p")
    office.loads.manage("reload", "p")
    for slot in range(2):
        office.loads.forget_worker(slot, blame=False)
    sent(office)
    office.loads.tick(0.0)
    assert sent(office) == everywhere(messages.Load(card("p")))


@in_office()
async def test_reload_of_a_model_whose_load_is_unanswered_waits_for_the_unload(office: Office) -> None:
    office.loads.start()
    sent(office)
    office.loads.manage("reload", "p")
    office.loads.tick(0.0)
    assert sent(office) == everywhere(messages.Unload("p")), "a load now would be taken for the first one"
    loaded_everywhere(office, "p")
    gone_everywhere(office, "p")
    office.loads.tick(0.0)
    assert sent(office) == everywhere(messages.Load(card("p")))


@in_office()
async def test_reload_of_a_directory_reads_its_files_anew(office: Office) -> None:
    office.registry.add(ModelSpec(id="d", directory="/somewhere"), False, card("d"))
    office.prepared = msgspec.structs.replace(card("d"), vocab_size=9)
    office.loads.manage("reload", "d")
    assert sent(office) == []
    await asyncio.gather(*office.tasks)
    assert sent(office) == everywhere(messages.Load(office.prepared))


@in_office()
async def test_model_that_is_unloaded_before_it_was_fetched_is_not_loaded(office: Office) -> None:
    office.loads.want("l")
    office.loads.manage("unload", "l")
    await asyncio.gather(*office.tasks)
    assert messages.Load(card("l")) not in [message for _, message in sent(office)]
    assert view(office, "l") == "available"


@in_office()
async def test_report_that_crosses_an_unload_does_not_bring_the_model_back(office: Office) -> None:
    office.report("p", "loading")
    office.loads.manage("unload", "p")
    assert view(office, "p") == "unloading"
    office.report("p", "loaded")
    gone_everywhere(office, "p")
    assert view(office, "p") == "available"
    office.loads.greet(office.children.workers[0])
    assert messages.Load(card("p")) not in [message for _, message in sent(office)]


@in_office()
async def test_preloaded_model_that_was_unloaded_is_not_retried_by_itself(office: Office) -> None:
    office.report("p", "loading", progress=0.0)
    office.loads.manage("unload", "p")
    office.report("p", "failed", error=to_wire(Internal("broke")))
    sent(office)
    office.loads.tick(1e9)
    assert sent(office) == []


# --- memory --------------------------------------------------------------------------------------------------------------

FULL = Memory(1000, 10)
EMPTY = Memory(1 << 40, 1 << 40)


def add_stub(office: Office, model: str, memory_mb: int, *, is_pinned: bool = False) -> ModelCard:
    known = ModelCard(id=model, kind="stub", stub=StubOptions(memory_mb=memory_mb))
    office.registry.add(ModelSpec(id=model), False, known, is_pinned=is_pinned)
    return known


@in_office(max_model_bytes=100 << 20)
async def test_load_waits_until_the_models_that_make_room_have_gone_and_memory_was_measured(office: Office) -> None:
    add_stub(office, "old", 30)
    loaded_everywhere(office, "old", 30 << 20)
    new = add_stub(office, "new", 40)
    sent(office)
    office.loads.want("new")
    assert sent(office) == everywhere(messages.Unload("old")), "two workers share the host's memory: 60 + 80 > 100 MiB"
    office.loads.take_memory(office.children.workers[0], EMPTY)
    office.loads.greet(office.children.workers[0])
    assert messages.Load(new) not in [message for _, message in sent(office)]
    loaded_everywhere(office, "p")
    gone_everywhere(office, "old")
    office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sent(office) == everywhere(messages.Load(new))
    assert office.children.counted == [("sie_pressure_evictions_total", "old")]


@in_office(max_model_bytes=100 << 20, devices=("cuda:0", "cuda:1"))
async def test_room_on_one_device_is_made_on_that_device_alone(office: Office) -> None:
    add_stub(office, "old", 60)
    loaded_everywhere(office, "old", 60 << 20)
    new = add_stub(office, "new", 60)
    sent(office)
    office.loads.want("new")
    assert sent(office) == [("worker-0", messages.Unload("old"))]
    office.loads.take_memory(office.children.workers[1], EMPTY)
    assert sent(office) == [], "it is asked for once"
    office.report("old", "available")
    assert view(office, "old") == "loaded"
    office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sent(office) == [("worker-0", messages.Load(new))]


@in_office(max_model_bytes=100 << 20, devices=("cuda:0",))
async def test_models_that_come_back_together_do_not_wait_for_each_other(office: Office) -> None:
    for model in "abc":
        add_stub(office, model, 10)
        office.loads.want(model)
        office.report(model, "loaded", memory_bytes=10 << 20)
        office.registry.release(office.registry.records[model])
        office.report(model, "available")
    sent(office)
    for model in "abc":
        office.loads.want(model)
    loaded: list[str] = []
    while told := [message.card.id for _, message in sent(office) if isinstance(message, messages.Load)]:
        for model in told:
            office.report(model, "loaded", memory_bytes=10 << 20)
        loaded += told
        office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sorted(loaded) == ["a", "b", "c"]


@in_office(max_model_bytes=100 << 20)
async def test_models_that_do_not_fit_together_take_turns_and_each_serves_who_waited_for_it(office: Office) -> None:
    worker, now_s = office.children.workers[0], time.monotonic()
    cards = {name: add_stub(office, name, 40) for name in "abc"}
    office.loads.want("a")
    loaded_everywhere(office, "a", 40 << 20)
    record = office.registry.records["a"]
    record.loaded_s = now_s
    sent(office)
    for model in "cb":
        office.loads.want(model)
        office.loads.take_memory(worker, EMPTY)
    assert sent(office) == [], "the clients of the first have not come back yet"
    record.loaded_s = now_s - 2.0
    office.loads.take_memory(worker, EMPTY)
    assert sent(office) == []
    office.loads.touch(("a",))
    office.loads.take_memory(worker, EMPTY)
    assert sent(office) == everywhere(messages.Unload("a")), "they have been served"
    gone_everywhere(office, "a")
    office.loads.want("a")
    assert sent(office) == [], "others were first"
    office.loads.take_memory(worker, EMPTY)
    assert sent(office) == everywhere(messages.Load(cards["c"])), "it waits longest"


@in_office(max_model_bytes=100 << 20)
async def test_models_that_a_load_waits_for_make_room_for_no_later_load(office: Office) -> None:
    worker, now_s = office.children.workers[0], time.monotonic()
    for name, size in (("old", 20), ("fresh", 20), ("large", 45), ("small", 20)):
        add_stub(office, name, size)
    for name in ("old", "fresh"):
        office.loads.want(name)
        loaded_everywhere(office, name, 20 << 20)
    record = office.registry.records["fresh"]
    record.loaded_s = now_s
    sent(office)
    for model in ("large", "small"):
        office.loads.want(model)
        office.loads.take_memory(worker, EMPTY)
    assert sent(office) == [], "room for the small one alone would let the large one wait for ever"
    grow_old(office, "fresh")
    office.loads.take_memory(worker, EMPTY)
    assert sent(office) == everywhere(messages.Unload("old")) + everywhere(messages.Unload("fresh"))


@in_office(max_model_bytes=100 << 20)
async def test_load_beside_another_one_waits_for_that_to_end(office: Office) -> None:
    add_stub(office, "first", 20)
    new = add_stub(office, "new", 20)
    office.report("first", "loading")
    office.loads.want("new")
    assert sent(office) == []
    loaded_everywhere(office, "first", 20 << 20)
    office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sent(office) == everywhere(messages.Load(new))


@in_office(max_model_bytes=100 << 20)
async def test_load_that_no_worker_has_answered_yet_counts_as_one_that_goes_on(office: Office) -> None:
    first, second = add_stub(office, "first", 30), add_stub(office, "second", 30)
    office.loads.want("first")
    office.loads.want("second")
    office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sent(office) == everywhere(messages.Load(first)), "60 + 60 > 100 MiB"
    loaded_everywhere(office, "first", 30 << 20)
    office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sent(office) == everywhere(messages.Unload("first"))
    gone_everywhere(office, "first")
    office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sent(office) == everywhere(messages.Load(second))


@in_office(max_model_bytes=100 << 20)
async def test_worker_that_dies_with_an_unanswered_load_does_not_hold_others_up(office: Office) -> None:
    add_stub(office, "first", 20)
    second = add_stub(office, "second", 20)
    office.loads.want("first")
    for worker in office.children.workers:
        worker.channel = None
        office.loads.forget_worker(worker.slot, blame=True)
    office.loads.manage("unload", "first")
    office.loads.manage("load", "first")
    office.loads.manage("unload", "first")
    sent(office)
    office.loads.want("second")
    assert sent(office) == everywhere(messages.Load(second))


@in_office(max_model_bytes=100 << 20)
async def test_load_that_pinned_models_leave_no_room_for_is_refused_until_its_cool_down(office: Office) -> None:
    add_stub(office, "pinned", 30, is_pinned=True)
    loaded_everywhere(office, "pinned", 30 << 20)
    add_stub(office, "new", 30)
    office.loads.want("new")
    record = office.registry.records["new"]
    assert sent(office) == []
    assert record.error is not None
    assert (record.error.extras["error_class"], record.error.extras["permanent"]) == ("PLACEMENT", False)
    assert "60 MiB on cpu, 20 MiB more" in record.error.message


@in_office()
async def test_device_under_pressure_gives_up_one_model_at_a_time(office: Office) -> None:
    loaded_everywhere(office, "p")
    for model in ("a", "b"):
        add_stub(office, model, 0)
        loaded_everywhere(office, model)
    office.registry.records["a"].last_used_s += 100.0
    sent(office)
    office.loads.take_memory(office.children.workers[0], EMPTY)
    assert sent(office) == []
    for _ in range(2):
        office.loads.take_memory(office.children.workers[1], FULL)
    assert sent(office) == everywhere(messages.Unload("b"))
    gone_everywhere(office, "b")
    office.loads.take_memory(office.children.workers[1], Memory(0, 0))
    office.loads._relieved_s = 0.0
    office.loads.take_memory(office.children.workers[1], Memory(0, 0))
    assert sent(office) == [], "nothing is known of the memory"
    office.loads.take_memory(office.children.workers[1], FULL)
    assert sent(office) == everywhere(messages.Unload("a"))
    gone_everywhere(office, "a")
    office.loads._relieved_s = 0.0
    office.loads.take_memory(office.children.workers[1], FULL)
    assert sent(office) == [], "what was loaded first stays"


@in_office()
async def test_step_without_memory_costs_another_model_its_place_and_never_its_own(office: Office) -> None:
    loaded_everywhere(office, "p")
    add_stub(office, "a", 0)
    loaded_everywhere(office, "a")
    sent(office)
    office.loads.relieve(office.children.workers[0], "a")
    assert sent(office) == []
    office.loads.relieve(office.children.workers[0], "p")
    office.loads.relieve(office.children.workers[0], "p")
    assert sent(office) == everywhere(messages.Unload("a"))
    assert office.children.counted == [("sie_oom_evictions_triggered_total", "a")]


@in_office()
async def test_load_that_overran_its_time_on_several_workers_is_one_failure_and_waits_for_its_cool_down(
    office: Office,
) -> None:
    killed: list[str] = []
    for worker in office.children.workers:
        worker.kill = lambda worker=worker: killed.append(worker.name)  # type: ignore[method-assign]
        office.report("p", "loading", slot=worker.slot, progress=0.0)
    office.loads.tick(office.registry.records["p"].loading_since_s[1] + 101)
    assert killed == ["worker-0", "worker-1"]
    error = office.registry.records["p"].error
    assert error is not None
    assert error.extras["attempts"] == 1


@in_office()
async def test_worker_that_was_killed_over_a_load_does_not_begin_it_again_at_once(office: Office) -> None:
    office.report("p", "loaded", slot=0)
    office.report("p", "loading", slot=1, progress=0.0)
    office.children.workers[1].kill = lambda: None  # type: ignore[method-assign]
    office.loads.tick(office.registry.records["p"].loading_since_s[1] + 101)
    office.loads.forget_worker(1, blame=True)
    sent(office)
    office.registry.records["p"].retry_at_s = 1e18
    office.loads.greet(office.children.workers[1])
    assert sent(office) == []
    assert view(office, "p") == "loaded", "the other worker serves it"


@in_office()
async def test_a_model_goes_to_the_workers_of_its_section_and_to_no_other(office: Office) -> None:
    office.registry.add(ModelSpec(id="n", devices=("cpu:1",)), False, card("n"))
    office.loads.want("n")
    loads = [name for name, message in office.children.take() if isinstance(message, messages.Load)]
    assert loads == ["worker-1"]
    for slot in range(2):  # both restart
        office.loads.forget_worker(slot, blame=False)
        office.loads.greet(office.children.workers[slot])
    greeted = [
        (name, message.card.id) for name, message in office.children.take() if isinstance(message, messages.Load)
    ]
    assert ("worker-1", "n") in greeted
    assert ("worker-0", "n") not in greeted


@in_office()
async def test_a_model_leaves_a_worker_that_is_set_aside(office: Office) -> None:
    office.registry.add(ModelSpec(id="one", replicas=1), False, card("one"))
    office.registry.add(ModelSpec(id="named", devices=("cpu:0",)), False, card("named"))
    for model in ("one", "named"):
        office.loads.want(model)
    office.children.take()
    office.loads.forget_worker(0, blame=False, is_lost=True)
    office.children.workers[0].state = "lost"
    for _ in range(2):
        office.loads.tick(0.0)
    loads = [(name, message.card.id) for name, message in office.children.take() if isinstance(message, messages.Load)]
    assert loads == [("worker-1", "one")]
