"""For any order of events, the state of a model or an adapter is one of the tables' states, and has one meaning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sie.catalog.spec import ModelSpec
from sie.ipc.messages import AdapterReport, ModelEntry, ModelReport
from sie.supervisor.adapter_registry import AdapterRegistry
from sie.supervisor.lifecycle import Event, LifecycleError, LifeStage, Place, can, next_place, next_stage
from sie.supervisor.model_registry import ModelRegistry
from sie.values.card import AdapterSpec, ModelCard
from sie.values.errors import Internal, to_wire

OFF = {LifeStage.IDLE, LifeStage.FAILED, LifeStage.RELEASED, LifeStage.DISMISSED}
REPORTS = ("loading", "loaded", "unloading", "available", "failed")
slots = st.integers(0, 2)
ERROR = to_wire(Internal("it broke", extras={"error_class": "UNKNOWN"}))


# --- the tables -------------------------------------------------------------------------------------------------------


def reached(start: LifeStage, *, without: frozenset[Event] = frozenset()) -> set[LifeStage]:
    found, new = {start}, [start]
    while new:
        stage = new.pop()
        for happened in Event:
            if happened not in without and can(stage, happened) and (after := next_stage(stage, happened)) not in found:
                found.add(after)
                new.append(after)
    return found


def test_every_state_can_be_reached_and_none_is_a_dead_end():
    assert reached(LifeStage.IDLE) == set(LifeStage)
    for stage in LifeStage:
        assert {LifeStage.SERVING, LifeStage.DISMISSED} <= reached(stage)


def test_each_state_is_on_off_or_on_its_way_back():
    for stage in LifeStage:
        assert (stage in OFF) + stage.is_wanted + stage.loads_again == 1, stage


def test_what_was_unloaded_comes_back_only_when_it_is_asked_for():
    asks = frozenset((Event.WANT, Event.RELOAD))
    assert reached(LifeStage.DISMISSED, without=asks) == {LifeStage.DISMISSED}
    assert reached(LifeStage.RELEASED, without=asks) == {LifeStage.RELEASED, LifeStage.DISMISSED}


def test_a_reload_goes_on_until_it_ends():
    """Requests wait for a model that is reloaded: nothing but an end of the reload takes it out of these states."""
    ends = {Event.LOADED, Event.KEEP, Event.FAIL, Event.RELEASE, Event.DISMISS}
    for stage in (stage for stage in LifeStage if stage.is_reloading):
        for happened in set(Event) - ends:
            if can(stage, happened):
                assert next_stage(stage, happened).is_reloading, (stage, happened)


def test_what_cannot_happen_is_refused():
    for stage, happened in (
        (LifeStage.IDLE, Event.GONE),
        (LifeStage.LOADING, Event.RENEW),
        (LifeStage.RELEASED, Event.FITS),
    ):
        with pytest.raises(LifecycleError, match=f"{happened.name} in {stage.name}"):
            next_stage(stage, happened)


@given(st.lists(st.sampled_from(["ask", *REPORTS]), max_size=12))
def test_a_place_is_the_last_report_of_its_worker(events: list[Any]) -> None:
    place = Place.ABSENT
    for happened in events:
        before, place = place, next_place(place, happened)
        if happened == "ask":
            assert place is (before if before.is_there else Place.ASKED)
        elif before is Place.ASKED and happened in ("unloading", "available"):
            assert place is Place.ASKED, "an answer to what was sent before the load"
        else:
            assert place.value == ("absent" if happened == "available" else happened)


# --- what asks them ---------------------------------------------------------------------------------------------------


class ModelMachine(RuleBasedStateMachine):
    """A registry of one model that hears anything, in any order that a server's messages can have."""

    @initialize(preload=st.booleans(), loaded=st.booleans())
    def start(self, preload: bool, loaded: bool) -> None:
        self.registry = ModelRegistry(10.0)
        self.now_s = 0.0
        card = ModelCard(id="m", kind="encoder")
        self.record = self.registry.add(ModelSpec(id="m", directory="/m"), preload, card)
        self.was_unloaded = False
        if loaded:
            self.serve(0)

    @rule(slot=slots)
    def serve(self, slot: int) -> None:
        self.demand()
        self.registry.report(slot, ModelReport("m", "loaded"), self.now_s)
        assert self.record.stage.loads_again or self.entry().state == "loaded"

    def entry(self) -> ModelEntry:
        (entry,) = self.registry.entries()
        return entry

    @rule(seconds=st.sampled_from([0.1, 30.0, 3000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for record in self.registry.due_again(self.now_s):
            assert record.wanted
            assert not self.was_unloaded
        for record in self.registry.due_reloads():
            assert record.wanted
            assert not any(map(record.is_moving, record.places))

    @rule(is_request=st.booleans())
    def load(self, is_request: bool) -> None:
        if is_request:
            self.want()
        else:
            self.demand()

    def want(self) -> None:
        was_on = self.record.wanted or self.record.stage.loads_again
        if self.registry.want("m", self.now_s) is not None:
            assert not was_on
            assert self.record.wanted
            self.was_unloaded = False

    def demand(self) -> None:
        self.registry.demand(self.record, self.now_s)
        assert self.record.wanted or self.record.stage.loads_again
        self.was_unloaded = False

    @rule(is_dismissed=st.booleans())
    def unload(self, is_dismissed: bool) -> None:
        if is_dismissed:
            self.registry.dismiss(self.record)
            self.was_unloaded = True
            assert self.entry().state in ("available", "unloading")
        else:
            self.registry.release(self.record)

    @rule()
    def reload(self) -> None:
        served = self.entry().state == "loaded"
        self.registry.reload(self.record, self.now_s)
        self.was_unloaded = False
        assert self.entry().reloading or not served, "requests wait for a model that is reloaded"
        assert self.entry().state != "available"

    @rule()
    def renew(self) -> None:
        before = self.entry()
        if self.registry.renew(self.record, self.now_s):
            assert before.state == "loaded"
            assert (self.entry().state, self.entry().reloading) == ("loaded", True)

    @precondition(lambda self: self.record.wanted)
    @rule(is_short=st.booleans())
    def plan(self, is_short: bool) -> None:
        self.record.apply(Event.SHORT if is_short else Event.FITS)
        assert self.record.wanted
        assert self.record.stage.waits_for_memory == is_short

    @precondition(lambda self: self.record.wanted)
    @rule(slot=slots)
    def send(self, slot: int) -> None:
        self.record.apply_at(slot, "ask")
        assert self.record.place(slot).is_there

    @rule(slot=slots, state=st.sampled_from(REPORTS))
    def report(self, slot: int, state: Any) -> None:
        was_renewing = self.record.stage is LifeStage.RENEWING
        error = ERROR if state == "failed" else None
        self.registry.report(slot, ModelReport("m", state, progress=0.5, error=error), self.now_s)
        if was_renewing and state == "loaded":
            assert self.entry().reloading, "another worker's copy is not the end of a reload"

    @rule()
    def fail(self) -> None:
        self.registry.fail(self.record, ERROR, self.now_s)
        assert self.entry().error is not None
        assert not (self.entry().reloading and self.entry().state == "failed")

    @rule(slot=slots, blame=st.booleans())
    def worker_dies(self, slot: int, blame: bool) -> None:
        before = self.entry()
        self.registry.forget_worker(slot, self.now_s, blame=blame)
        assert not self.record.place(slot).is_there
        if before.state == "loaded" and before.workers == (slot,) and not blame:
            assert self.entry().recovering or self.entry().reloading, "requests wait for it"

    @invariant()
    def an_entry_means_one_thing(self) -> None:
        if not hasattr(self, "registry"):
            return
        entry = self.entry()
        assert (entry.state == "loaded") == (bool(entry.workers) and self.record.wanted)
        assert not (entry.recovering and entry.workers)
        assert not (entry.dismissed and (entry.reloading or entry.recovering))
        assert entry.state != "failed" or entry.error is not None
        assert not self.was_unloaded or entry.dismissed
        if entry.state == "available":
            assert not entry.workers
            assert self.record.stage in OFF
        event(f"stage {self.record.stage.name}")


class AdapterMachine(RuleBasedStateMachine):
    """A registry of three adapters, of which two may be loaded."""

    names = "abc"

    def __init__(self) -> None:
        super().__init__()
        specs = [AdapterSpec(model="m", id=name, directory=f"/{name}") for name in self.names]
        self.registry = AdapterRegistry(specs, 2, 10.0)
        self.now_s = 0.0
        self.returning: set[str] = set()
        """Adapters that were wanted again before a worker had unloaded them. Their next load makes room for them."""

    def record(self, name: str) -> Any:
        return self.registry._by_model["m"][name]

    @rule(name=st.sampled_from(names))
    def want(self, name: str) -> None:
        was_wanted, had_workers = self.record(name).wanted, bool(self.record(name).loaded_on)
        if self.registry.want("m", name, self.now_s) is not None:
            assert not was_wanted
            assert self.registry.entries("m")[name].state == "loading" or had_workers
            if had_workers:
                self.returning.add(name)

    @rule(name=st.sampled_from(names), slot=slots, state=st.sampled_from(REPORTS))
    def report(self, name: str, slot: int, state: Any) -> None:
        error = ERROR if state == "failed" else None
        over = self.registry.report(slot, AdapterReport("m", name, state, error=error), self.now_s)
        assert all(not record.wanted for record in over), "only what is not wanted is unloaded"
        if state == "loaded" and self.record(name).wanted:
            self.returning.clear()  # room is made for all of them at once
        if state == "loaded" and not self.record(name).wanted:
            assert self.record(name) in over

    @rule(slot=slots, is_kept=st.booleans())
    def forget(self, slot: int, is_kept: bool) -> None:
        self.registry.forget(slot, "m", self.now_s, is_kept=is_kept)
        assert is_kept or not self.registry.wanted_of("m")

    @rule(seconds=st.sampled_from([1.0, 200.0]), is_hosted=st.booleans())
    def time_passes(self, seconds: float, is_hosted: bool) -> None:
        self.now_s += seconds
        for record in self.registry.overdue(100.0, self.now_s, ["m"] if is_hosted else []):
            assert not record.wanted
            assert record.error is not None

    @invariant()
    def an_entry_means_one_thing(self) -> None:
        entries = self.registry.entries("m")
        assert sum(entry.state == "loaded" for entry in entries.values()) <= 2 + len(self.returning)
        for name, entry in entries.items():
            assert (entry.state == "loaded") == bool(entry.workers)
            assert not (entry.recovering and entry.state != "loading")
            assert entry.state != "failed" or entry.error is not None
            assert not self.record(name).stage.is_reloading


TestModels = ModelMachine.TestCase
TestModels.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestAdapters = AdapterMachine.TestCase
TestAdapters.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
