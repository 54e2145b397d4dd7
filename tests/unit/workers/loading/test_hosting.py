from __future__ import annotations

import gc
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sie.ipc.messages import CacheRoom, Load, ModelReport, Stage, Staged
from sie.runtime.child_setup import calm_collector
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.fallbacks import Fallback
from sie.workers.device.fallbacks import note
from sie.workers.loading.hosting import Host

DEADLINE_S = 60.0


def readable(event_fd: int, timeout_s: float) -> bool:
    """Wait for an event; unlike select, poll also takes the high descriptors of a long test process."""
    poll = select.poll()
    poll.register(event_fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1e3))


class Runner:
    memory_bytes = 11
    dtype = "float32"


class Hosting:
    """A host, what it reported, and the thread in which it builds."""

    def __init__(self) -> None:
        self.reports: list[ModelReport] = []
        self.staged: list[Staged] = []
        self.built: list[str] = []
        self.rooms: list[CacheRoom] = []
        self.build: Callable[[ModelCard, Callable[[float, str], None]], Any] = lambda _card, _progress: Runner()
        self.host = Host("cpu", self._build, self._send)

    def _build(self, card: ModelCard, progress: Callable[[float, str], None], room: CacheRoom) -> Any:
        self.built.append(card.id)
        assert threading.current_thread() is not threading.main_thread()
        self.rooms.append(room)
        return self.build(card, progress)

    def _send(self, message: ModelReport | Staged) -> None:
        (self.staged if isinstance(message, Staged) else self.reports).append(message)  # type: ignore[arg-type]

    def stage(self, number: int, model: str = "m") -> ModelCard:
        """Stage a successor of a model with a card of its own."""
        card = ModelCard(id=model, kind="encoder", directory=f"successor {number}")
        self.host.stage(Stage(number, card))
        return card

    def collect_staged(self) -> Staged:
        """Take over news until a successor stands or has failed."""
        while not self.staged:
            assert readable(self.host.event_fd, DEADLINE_S), "not staged in time"
            self.host.collect()
        return self.staged.pop()

    def load(self, model: str) -> None:
        self.host.load(ModelCard(id=model, kind="encoder"))

    def collect_until(self, state: str) -> ModelReport:
        """Take over news until a report of this state came."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            found = [report for report in self.reports if report.state == state and report.progress is None]
            if found:
                return found[-1]
            left_s = deadline_s - time.monotonic()
            assert readable(self.host.event_fd, max(0.0, left_s)), f"not {state} in time"
            self.host.collect()

    @property
    def states(self) -> list[str]:
        return [report.state for report in self.reports if report.progress is None]


@pytest.fixture
def hosting() -> Hosting:
    return Hosting()


def test_load_says_loading_at_once_and_loaded_when_it_is_taken_over(hosting):
    hosting.load("m")
    assert hosting.states == ["loading"]
    assert hosting.host.runner("m") is None
    report = hosting.collect_until("loaded")

    assert isinstance(hosting.host.runner("m"), Runner)
    assert (report.model, report.device, report.memory_bytes, report.dtype) == ("m", "cpu", 11, "float32")


def test_progress_is_passed_on_in_order(hosting):
    def build(_card, progress):
        progress(0.25, "reading")
        progress(0.75, "moving")
        return Runner()

    hosting.build = build
    hosting.load("m")
    hosting.collect_until("loaded")

    told = [(report.progress, report.detail) for report in hosting.reports if report.progress is not None]
    assert told == [(0.0, "starting"), (0.25, "reading"), (0.75, "moving")]


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (ModelLoadFailed("gated", extras={"error_class": "GATED"}), "GATED"),
        (MemoryError(), "OOM"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "OOM"),
        (KeyError("secret path"), "UNKNOWN"),
        (SystemExit(3), "UNKNOWN"),
    ],
)
def test_failed_load_says_why_and_leaves_the_next_one_possible(hosting, error, error_class):
    def build(_card, _progress):
        raise error

    hosting.build = build
    hosting.load("m")
    report = hosting.collect_until("failed")

    assert report.error.extras["error_class"] == error_class
    assert "secret" not in report.error.message
    # The lead that a frontend replaces by its own: else a client would read the model's name twice.
    assert error_class == "GATED" or report.error.message.startswith("Model 'm' cannot be loaded: ")
    assert hosting.host.models == {}
    hosting.build = lambda _card, _progress: Runner()
    hosting.load("m")
    hosting.collect_until("loaded")


def test_a_load_that_misses_a_library_names_it_and_is_of_the_permanent_class(hosting):
    def build(_card, _progress):
        raise ImportError("\nTimmBackbone requires the timm library, but it was not found.\nInstall it.")

    hosting.build = build
    hosting.load("m")
    error = hosting.collect_until("failed").error
    assert error.extras == {"error_class": "DEPENDENCY"}
    assert error.message == (
        "Model 'm' cannot be loaded: a library is missing or broken: "
        "TimmBackbone requires the timm library, but it was not found."
    )


def test_models_load_one_at_a_time_in_order(hosting):
    may_end = threading.Semaphore(0)

    def build(_card, _progress):
        assert may_end.acquire(timeout=DEADLINE_S)
        return Runner()

    hosting.build = build
    for model in "abc":
        hosting.load(model)
    deadline_s = time.monotonic() + DEADLINE_S
    for num_loaded, model in enumerate("abc"):
        assert len(hosting.built) <= num_loaded + 1
        may_end.release()
        while hosting.host.runner(model) is None:
            assert readable(hosting.host.event_fd, deadline_s - time.monotonic())
            hosting.host.collect()

    assert hosting.built == ["a", "b", "c"]


def test_second_load_of_the_same_model_does_nothing(hosting):
    may_end = threading.Event()

    def build(_card, _progress):
        assert may_end.wait(DEADLINE_S)
        return Runner()

    hosting.build = build
    hosting.load("m")
    hosting.load("m")
    may_end.set()
    hosting.collect_until("loaded")
    hosting.load("m")

    assert hosting.built == ["m"]
    assert hosting.states == ["loading", "loaded"]


def test_unloading_model_keeps_its_runner_for_what_is_queued_and_takes_no_more(hosting):
    hosting.load("m")
    hosting.collect_until("loaded")
    hosting.host.start_unload("m")

    assert hosting.host.runner("m") is None
    assert hosting.host.models["m"].runner is not None
    assert hosting.host.unloading() == ["m"]
    hosting.host.finish_unload("m")
    assert hosting.host.models == {}
    assert hosting.states == ["loading", "loaded", "unloading", "available"]


def test_load_calls_an_unload_off_that_has_not_ended(hosting):
    hosting.load("m")
    hosting.collect_until("loaded")
    hosting.host.start_unload("m")
    hosting.load("m")

    assert hosting.host.runner("m") is not None
    assert hosting.host.unloading() == []
    assert hosting.states == ["loading", "loaded", "unloading", "loaded"]
    assert hosting.built == ["m"]


def test_another_definition_is_loaded_once_the_old_one_has_answered_its_last_request(hosting):
    hosting.load("m")
    hosting.collect_until("loaded")
    hosting.host.start_unload("m")
    hosting.host.load(ModelCard(id="m", kind="encoder", directory="another"))
    assert hosting.host.runner("m") is None
    hosting.host.finish_unload("m")
    hosting.reports.clear()
    hosting.collect_until("loaded")

    assert hosting.host.models["m"].card.directory == "another"
    assert hosting.built == ["m", "m"]


def test_each_load_builds_with_the_memory_that_its_message_leaves_to_the_cache(hosting):
    rooms = [CacheRoom(95.0, number << 30, 0.5) for number in range(3)]
    card = ModelCard(id="m", kind="generator")
    hosting.host.apply(Load(card, rooms[0]))
    hosting.collect_until("loaded")
    hosting.host.apply(Stage(1, msgspec.structs.replace(card, directory="staged"), rooms[1]))
    hosting.collect_staged()
    hosting.host.start_unload("m")
    hosting.host.apply(Load(msgspec.structs.replace(card, directory="another"), rooms[2]))
    hosting.host.finish_unload("m")
    hosting.reports.clear()
    hosting.collect_until("loaded")
    assert hosting.rooms == rooms


def test_another_definition_that_comes_while_the_old_one_loads_is_the_one_that_serves(hosting):
    may_end = threading.Event()
    hosting.build = lambda _card, _progress: may_end.wait(DEADLINE_S) and Runner()
    hosting.load("m")
    hosting.host.start_unload("m")
    hosting.host.load(ModelCard(id="m", kind="encoder", directory="another"))
    may_end.set()
    hosting.collect_until("loaded")

    assert hosting.host.models["m"].card.directory == "another"


def test_failure_of_a_load_that_is_not_wanted_any_more_is_not_that_of_the_next_definition(hosting):
    begun, may_end = threading.Event(), threading.Event()

    def build(card: ModelCard, _progress: Any) -> Runner:
        if card.directory == "old":
            begun.set()
            assert may_end.wait(DEADLINE_S)
            raise ModelLoadFailed("it broke")
        return Runner()

    hosting.build = build
    hosting.host.load(ModelCard(id="m", kind="encoder", directory="old"))
    assert begun.wait(DEADLINE_S)
    hosting.host.start_unload("m")
    hosting.host.load(ModelCard(id="m", kind="encoder", directory="new"))
    may_end.set()
    hosting.collect_until("loaded")
    assert [report.state for report in hosting.reports if report.progress is None] == [
        "loading", "available", "loading", "loaded",
    ]  # fmt: skip


def test_another_definition_that_is_unwanted_again_is_not_loaded(hosting):
    hosting.load("m")
    hosting.collect_until("loaded")
    hosting.host.start_unload("m")
    hosting.host.load(ModelCard(id="m", kind="encoder", directory="another"))
    hosting.host.start_unload("m")
    hosting.host.finish_unload("m")

    assert hosting.host.models == {}
    assert hosting.built == ["m"]


def test_unload_of_what_is_not_there_does_nothing(hosting):
    hosting.load("m")
    hosting.host.start_unload("unknown")

    assert hosting.states == ["loading"]
    hosting.collect_until("loaded")


def test_model_that_is_unloaded_while_it_loads_goes_as_soon_as_it_is_there(hosting):
    may_end = threading.Event()
    hosting.build = lambda _card, _progress: may_end.wait(DEADLINE_S) and Runner()
    hosting.load("m")
    hosting.host.start_unload("m")
    assert hosting.states == ["loading"]
    may_end.set()
    hosting.collect_until("available")

    assert hosting.host.runner("m") is None
    assert hosting.host.models == {}
    assert hosting.states == ["loading", "available"]


def test_model_that_is_wanted_again_before_its_load_has_ended_stays(hosting):
    may_end = threading.Event()
    hosting.build = lambda _card, _progress: may_end.wait(DEADLINE_S) and Runner()
    hosting.load("m")
    hosting.host.start_unload("m")
    hosting.load("m")
    may_end.set()
    hosting.collect_until("loaded")

    assert hosting.host.runner("m") is not None
    assert hosting.built == ["m"]


def test_load_that_has_not_begun_is_called_off(hosting):
    may_end = threading.Event()
    hosting.build = lambda _card, _progress: may_end.wait(DEADLINE_S) and Runner()
    hosting.load("first")
    hosting.load("m")
    hosting.host.start_unload("m")
    may_end.set()
    hosting.collect_until("loaded")

    assert hosting.built == ["first"]
    assert hosting.states == ["loading", "loading", "available", "loaded"]


@pytest.mark.usefixtures("real_freeze")
def test_unloaded_model_is_freed_though_it_holds_itself_and_was_frozen(hosting):
    """The loop freezes what lives when a load ends, and a model of any size has cycles."""
    hosting.load("m")
    hosting.collect_until("loaded")
    runner = hosting.host.models["m"].runner
    runner.itself = runner
    alive = weakref.ref(runner)
    del runner
    for thread in threading.enumerate():  # one that is still on its way out holds what it loaded
        if thread.name == "load":
            thread.join(DEADLINE_S)
    calm_collector()
    try:
        hosting.host.start_unload("m")
        hosting.host.finish_unload("m")
        assert alive() is None
    finally:
        gc.freeze()  # or each collection of the tests that follow looks through all imports
        gc.set_threshold(700, 10, 10)


def test_a_successor_is_staged_while_the_model_serves_and_is_there_at_once_when_it_is_loaded(hosting):
    hosting.load("m")
    hosting.collect_until("loaded")
    before = hosting.host.runner("m")
    card = hosting.stage(7)
    assert hosting.collect_staged() == Staged(7, "m")
    assert hosting.host.runner("m") is before
    assert hosting.states == ["loading", "loaded"]
    hosting.host.start_unload("m")
    hosting.host.finish_unload("m")
    hosting.reports.clear()
    hosting.host.load(msgspec.structs.replace(card))
    hosting.collect_until("loaded")
    assert hosting.built == ["m", "m"]
    assert hosting.host.runner("m") not in (None, before)
    assert hosting.host.models["m"].card == card


def test_a_successor_that_cannot_be_built_leaves_the_model(hosting):
    hosting.load("m")
    hosting.collect_until("loaded")

    def build(_card, _progress):
        raise ModelLoadFailed("no such layer")

    hosting.build = build
    hosting.stage(7)
    staged = hosting.collect_staged()
    assert (staged.number, staged.error.message) == (7, "no such layer")
    assert hosting.host.runner("m") is not None
    assert hosting.states == ["loading", "loaded"]


def test_a_successor_that_is_called_off_while_it_is_built_is_let_go(hosting):
    hosting.load("m")
    hosting.collect_until("loaded")
    may_end = threading.Event()
    built: list[weakref.ref[Runner]] = []

    def build(_card, progress):
        progress(0.5, "half")
        assert may_end.wait(DEADLINE_S)
        runner = Runner()
        built.append(weakref.ref(runner))
        return runner

    hosting.build = build
    hosting.stage(1)
    hosting.stage(2)
    hosting.host.unstage("m")
    hosting.load("n")
    may_end.set()
    hosting.collect_until("loaded")
    while hosting.host.runner("n") is None:
        assert readable(hosting.host.event_fd, DEADLINE_S), "not loaded in time"
        hosting.host.collect()
    assert hosting.staged == []
    assert hosting.built == ["m", "m", "n"]
    assert [report.model for report in hosting.reports if report.progress is not None and report.progress] == ["n"]
    gc.collect()
    assert built[0]() is None


def test_another_card_than_that_of_the_successor_is_loaded_from_its_files(hosting):
    hosting.stage(1)
    hosting.collect_staged()
    hosting.load("m")
    hosting.collect_until("loaded")
    assert hosting.built == ["m", "m"]


def test_a_model_that_is_wanted_again_after_its_cancelled_load_is_announced_before_it_takes_work(hosting):
    """The loop prepares for a model that `collect` returns: metrics, text generation, ceilings."""
    may_end = threading.Event()
    hosting.build = lambda _card, _progress: may_end.wait(DEADLINE_S) and Runner()
    hosting.load("m")
    hosting.host.start_unload("m")
    may_end.set()
    while hosting.states == ["loading"]:
        assert readable(hosting.host.event_fd, DEADLINE_S), "the load does not end"
        assert hosting.host.collect() == []
    hosting.load("m")
    announced = []
    while not announced and hosting.host.runner("m") is None:
        assert readable(hosting.host.event_fd, DEADLINE_S), "not loaded in time"
        announced += hosting.host.collect()
    assert [hosted.card.id for hosted in announced] == ["m"]


def test_fallbacks_of_a_load_are_in_its_report_and_go_with_a_staged_successor(hosting):
    def build(card, _progress):
        note("no_kernels", "no compiler")
        note("no_kernels", "another reason")
        note("cpu", "no provider") if card.directory else None
        return Runner()

    hosting.build = build
    hosting.host.device = "cuda:0"
    hosting.load("m")
    report = hosting.collect_until("loaded")
    assert (report.device, report.fallbacks) == ("cuda:0", (Fallback("no_kernels", "no compiler"),))
    card = hosting.stage(7)
    assert hosting.collect_staged().error is None
    hosting.host.start_unload("m")
    hosting.host.finish_unload("m")
    hosting.reports.clear()
    hosting.host.load(card)
    report = hosting.collect_until("loaded")
    assert (report.device, [fallback.name for fallback in report.fallbacks]) == ("cpu", ["no_kernels", "cpu"])
    assert hosting.built == ["m", "m"], "the successor was not built twice"
