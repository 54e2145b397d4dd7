"""Whatever a worker is asked, in whatever order its loads end, it has the models and adapters that were asked for last.

The hosts are the real ones. Their loads end when the machine says so.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sie.ipc.messages import AdapterReport, ModelReport, Stage, Staged
from sie.supervisor.lifecycle import Place, next_place
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import Internal
from sie.workers.loading import adapters as adapter_hosting
from sie.workers.loading import hosting
from sie.workers.loading.states import LoadEvent, LoadState, LoadStateError, next_state
from tests.unit.workers.loading.stepped_host import SteppedAdapterHost, SteppedHost

MODELS, ADAPTERS = ("m", "n"), ("a", "b")
models, adapters = st.sampled_from(MODELS), st.sampled_from(ADAPTERS)
faults = st.sampled_from([False, False, False, True])


# --- the table --------------------------------------------------------------------------------------------------------


def moves(state: LoadState) -> dict[LoadEvent, LoadState]:
    found: dict[LoadEvent, LoadState] = {}
    for happened in LoadEvent:
        with contextlib.suppress(LoadStateError):
            found[happened] = next_state(state, happened)
    return found


def test_every_state_can_be_reached_and_none_is_a_dead_end():
    for start in LoadState:
        reached, new = {start}, [start]
        while new:
            for after in moves(new.pop()).values():
                if after not in reached:
                    reached.add(after)
                    new.append(after)
        assert reached == set(LoadState)


def test_a_load_is_always_possible_and_leads_to_a_load_that_counts():
    for state in LoadState:
        assert next_state(state, LoadEvent.LOAD) in (LoadState.QUEUED, LoadState.LOADING, LoadState.LOADED)


@pytest.mark.parametrize(
    ("state", "happened"),
    [
        (LoadState.ABSENT, LoadEvent.READY),
        (LoadState.QUEUED, LoadEvent.READY),
        (LoadState.LOADED, LoadEvent.FREE),
        (LoadState.LOADED, LoadEvent.READY),
        (LoadState.UNLOADING, LoadEvent.FAIL),
    ],
)
def test_an_event_that_cannot_happen_is_refused(state, happened):
    with pytest.raises(LoadStateError, match=f"{happened.name} in {state.name}"):
        next_state(state, happened)


@given(st.lists(st.sampled_from(LoadEvent), max_size=15))
def test_the_supervisor_sees_in_the_reports_what_a_worker_has(events: list[LoadEvent]) -> None:
    state, place = LoadState.ABSENT, Place.ABSENT
    for happened in events:
        if happened not in moves(state):
            continue
        before, state = state, next_state(state, happened)
        if state.report != before.report:
            place = next_place(place, state.report)
        assert place.is_there != state.is_gone
        assert (place is Place.LOADED) == (state is LoadState.LOADED)


# --- the models of a worker -------------------------------------------------------------------------------------------


class Runner:
    """A model in memory. `memory` of the machine is what is there."""

    memory_bytes = 1

    def __init__(self, card: ModelCard, memory: set[int]) -> None:
        self.card = card
        self._memory = memory
        memory.add(id(self))

    def __del__(self) -> None:
        self._memory.discard(id(self))


class HostMachine(RuleBasedStateMachine):
    """`wanted` is each model's last message but one that its load has refused; `staged` the numbers to be answered."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(hosting, "free_model", lambda: None)
        self.memory: set[int] = set()
        self.announced: list[Any] = []
        self.wanted: set[str] = set()
        self.reported = dict.fromkeys(MODELS, "available")
        self.successors: dict[str, int] = {}
        """The number of each model's latest `Stage` that neither was answered nor called off."""
        self.fails = False
        self.num_cards = 0
        self.host = SteppedHost("cpu", self.build, self.on_report)

    def build(self, card: ModelCard, progress: Any, _room: Any) -> Any:
        progress(0.5, "half")
        if self.fails:
            raise Internal("it broke")
        return Runner(card, self.memory)

    def on_report(self, message: ModelReport | Staged) -> None:
        if isinstance(message, Staged):
            assert self.successors.pop(message.model) == message.number, "answered once, and only while it is wanted"
            return
        if message.progress is not None:
            assert message.state == self.reported[message.model] == "loading"
            return
        assert message.state != self.reported[message.model]
        assert (message.state == "failed") == (message.error is not None)
        self.reported[message.model] = message.state
        if message.state == "failed":
            self.wanted.discard(message.model)

    def card(self, model: str, *, is_new: bool = True) -> ModelCard:
        self.num_cards += is_new
        return ModelCard(id=model, kind="encoder", revision=str(self.num_cards))

    @rule(model=models, is_new=st.booleans())
    def load(self, model: str, is_new: bool) -> None:
        self.wanted.add(model)
        self.host.load(self.card(model, is_new=is_new))

    @rule(model=models)
    def unload(self, model: str) -> None:
        self.wanted.discard(model)
        self.host.start_unload(model)

    @rule(model=models)
    def stage(self, model: str) -> None:
        card = self.card(model)
        self.successors[model] = self.num_cards
        self.host.stage(Stage(self.num_cards, card))

    @rule(model=models)
    def unstage(self, model: str) -> None:
        self.successors.pop(model, None)
        self.host.unstage(model)

    @precondition(lambda self: self.host.loads.running is not None)
    @rule(fails=faults)
    def end_load(self, fails: bool) -> None:
        self.fails = fails
        self.host.loads.end_load()

    @precondition(lambda self: self.host.loads.has_results)
    @rule()
    def collect(self) -> None:
        for hosted in self.host.collect():
            self.announced.append(id(hosted.runner))

    @precondition(lambda self: self.host.unloading())
    @rule()
    def finish_unload(self) -> None:
        self.host.finish_unload(self.host.unloading()[0])

    @invariant()
    def a_model_takes_work_only_while_it_is_wanted(self) -> None:
        for model in MODELS:
            hosted, runner = self.host.models.get(model), self.host.runner(model)
            assert runner is None or model in self.wanted
            assert runner is None or id(runner) in self.announced, "the loop has prepared for it"
            if hosted is None:
                assert self.reported[model] in ("available", "failed")
                assert model not in self.wanted
            else:
                assert hosted.state.report == self.reported[model]
                assert (hosted.runner is not None) == (hosted.state in (LoadState.LOADED, LoadState.UNLOADING))
                event(f"model {hosted.state.name}")

    def teardown(self) -> None:
        while self.host.has_work:
            for hosted in self.host.collect() if self.host.loads.has_results else ():
                self.announced.append(id(hosted.runner))
            self.host.step()
        self.host.step()
        assert not self.successors, "every successor that was still wanted was answered"
        for model in MODELS:
            assert (model in self.host.models) == (model in self.wanted)
            self.host.unstage(model)
        assert self.memory == {id(hosted.runner) for hosted in self.host.models.values()}, "all else is freed"
        os.close(self.host.event_fd)
        self.patch.undo()


# --- its adapters -----------------------------------------------------------------------------------------------------


class Weights(set[str]):
    """The adapters of a model in memory. needed are those that an item waits for."""

    def __init__(self, machine: AdapterMachine) -> None:
        super().__init__()
        self._machine = machine

    def read(self, spec: AdapterSpec) -> str:
        if self._machine.fails:
            raise Internal("it broke")
        return spec.id

    def install(self, name: str, weights: str) -> int:
        assert name == weights
        assert name not in self
        self.add(name)
        return 1

    def remove(self, name: str) -> None:
        assert name not in self._machine.needed
        super().remove(name)


class AdapterMachine(RuleBasedStateMachine):
    """A model that comes and goes, and two adapters. The supervisor sends wanted adapters again after each load."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for module in (hosting, adapter_hosting):
            self.patch.setattr(module, "free_model", lambda: None)
        self.fails = False
        self.needed: set[str] = set()
        self.wanted: set[str] = set()
        self.reported = dict.fromkeys(ADAPTERS, "available")
        self.counts: dict[str, int] = {}
        self.host = SteppedHost("cpu", self.build, self.on_model)
        self.adapters = SteppedAdapterHost(self.host, self.on_adapter, self.counts.__setitem__)
        self.load_model()
        self.host.step()

    def build(self, card: ModelCard, _progress: Any, _room: Any) -> Any:
        return SimpleNamespace(memory_bytes=1, adapters=Weights(self))

    def on_model(self, report: ModelReport) -> None:
        if report.state == "loaded":
            for name in self.wanted:
                self.adapters.load(AdapterSpec(model="m", id=name, directory="/a"))

    def on_adapter(self, report: AdapterReport) -> None:
        assert (report.state == "failed") == (report.error is not None)
        self.reported[report.adapter] = report.state
        if report.state == "failed":
            self.wanted.discard(report.adapter)

    @rule()
    def load_model(self) -> None:
        self.host.load(ModelCard(id="m", kind="encoder"))

    @rule()
    def unload_model(self) -> None:
        self.host.start_unload("m")

    @precondition(lambda self: self.host.has_work)
    @rule()
    def step(self) -> None:
        self.host.step()
        if "m" not in self.host.models:
            self.adapters.forget("m")
            self.needed.clear()

    @rule(name=adapters)
    def load(self, name: str) -> None:
        self.wanted.add(name)
        self.adapters.load(AdapterSpec(model="m", id=name, directory="/a"))

    @rule(name=adapters)
    def unload(self, name: str) -> None:
        self.wanted.discard(name)
        self.adapters._start_unload("m", name)

    @precondition(lambda self: self.adapters.loads.running is not None)
    @rule(fails=faults)
    def end_load(self, fails: bool) -> None:
        self.fails = fails
        self.adapters.loads.end_load()

    @precondition(lambda self: self.adapters.loads.has_results)
    @rule()
    def collect(self) -> None:
        self.adapters.collect()

    @rule(name=adapters)
    def ask(self, name: str) -> None:
        """A request comes for an adapter, and waits for its step if the adapter may be used."""
        if self.host.runner("m") is not None and self.adapters.refusal("m", name) is None:
            assert name in self.weights()
            assert name in self.wanted
            self.needed.add(name)
            event("a request waits for an adapter")

    @precondition(lambda self: self.needed)
    @rule()
    def answer(self) -> None:
        self.needed.clear()

    @precondition(lambda self: self.adapters.loads.running is not None)
    @rule()
    def read_whole(self) -> None:
        self.end_load(False)
        self.adapters.collect()

    @rule()
    def settle(self) -> None:
        waiting = [SimpleNamespace(request=SimpleNamespace(header=SimpleNamespace(lora=name))) for name in self.needed]
        self.adapters.settle(lambda _model: waiting)  # type: ignore[arg-type, return-value]

    def weights(self) -> Any:
        hosted = self.host.models.get("m")
        return hosted.runner.adapters if hosted is not None and hosted.runner is not None else set()  # type: ignore[attr-defined]

    @invariant()
    def what_is_in_memory_is_known(self) -> None:
        known = {
            key[1]: adapter.state
            for key, adapter in self.adapters._adapters.items()
            if adapter.state in (LoadState.LOADED, LoadState.UNLOADING)
        }
        assert known.keys() == self.weights()
        assert self.counts.get("m", 0) == len(self.weights())
        for name in ADAPTERS:
            adapter = self.adapters._adapters.get(("m", name))
            if adapter is not None:
                assert adapter.state.report == self.reported[name]
                event(f"adapter {adapter.state.name}")
            elif self.host.runner("m") is not None:
                assert self.reported[name] in ("available", "failed")

    def teardown(self) -> None:
        self.needed.clear()
        while self.host.has_work:
            self.step()
        for _ in range(2 * len(ADAPTERS) + 2):
            if self.adapters.loads.running is not None:
                self.fails = False
                self.adapters.loads.end_load()
            if self.adapters.loads.has_results:
                self.adapters.collect()
            self.settle()
        served = self.host.runner("m") is not None
        assert self.weights() == (self.wanted if served else set())
        assert all((state == "loaded") == (name in self.weights()) for name, state in self.reported.items())
        os.close(self.host.event_fd)
        os.close(self.adapters.event_fd)
        self.patch.undo()


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAdapterHost = AdapterMachine.TestCase
TestAdapterHost.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
