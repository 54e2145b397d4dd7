from __future__ import annotations

from typing import Any

from sie.ipc.messages import AdapterReport
from sie.supervisor.adapter_registry import AdapterRecord, AdapterRegistry
from sie.values.card import AdapterSpec
from sie.values.errors import BadRequest, Internal, to_wire

FAULT = to_wire(Internal("it does not fit"))


def registry(*names: str, max_loras: int = 2) -> AdapterRegistry:
    specs = [AdapterSpec(model="m", id=name, directory=f"/{name}") for name in names or "abc"]
    return AdapterRegistry(specs, max_loras, 30.0)


def ids(records: list[AdapterRecord]) -> list[str]:
    return [record.spec.id for record in records]


def tell(
    adapters: AdapterRegistry, adapter: str, state: Any, slot: int = 0, now_s: float = 0.0, **details: Any
) -> list[str]:
    return ids(adapters.report(slot, AdapterReport("m", adapter, state, **details), now_s))


def load(adapters: AdapterRegistry, name: str, slot: int = 0) -> list[str]:
    adapters.want("m", name, 0.0)
    return tell(adapters, name, "loaded", slot)


def states(adapters: AdapterRegistry) -> dict[str, str]:
    return {name: entry.state for name, entry in adapters.entries("m").items()}


def test_adapter_is_loaded_for_the_first_request_only() -> None:
    adapters = registry()
    assert states(adapters) == {"a": "available", "b": "available", "c": "available"}
    record = adapters.want("m", "a", 0.0)
    assert record is not None
    assert record.is_on_disk
    assert adapters.want("m", "a", 0.0) is None
    assert states(adapters)["a"] == "loading"
    tell(adapters, "a", "loading")
    assert tell(adapters, "a", "loaded") == []
    assert (adapters.entries("m")["a"].state, adapters.entries("m")["a"].workers) == ("loaded", (0,))


def test_adapter_that_was_loaded_when_its_worker_died_is_recovering() -> None:
    adapters = registry()
    load(adapters, "a")
    adapters.want("m", "b", 0.0)
    adapters.forget(0, None, 1.0, is_kept=True)
    assert [adapters.entries("m")[name].recovering for name in "abc"] == [True, False, False]
    tell(adapters, "a", "loaded")
    assert not adapters.entries("m")["a"].recovering
    adapters.forget(0, "m", 2.0, is_kept=False)
    adapters.want("m", "a", 3.0)
    assert not adapters.entries("m")["a"].recovering, "its model had gone for good"


def test_undeclared_adapters_and_models_are_nobody_s() -> None:
    adapters = registry()
    assert adapters.want("m", "x", 0.0) is None
    assert adapters.want("n", "a", 0.0) is None
    assert adapters.entries("n") == {}
    adapters.touch((("m", "x"), ("n", "a")))
    assert tell(adapters, "x", "loaded") == []


def test_least_recently_used_adapter_goes_once_another_is_loaded() -> None:
    adapters = registry()
    load(adapters, "a")
    load(adapters, "b")
    adapters.touch((("m", "b"), ("m", "a")))
    adapters.want("m", "c", 0.0)
    assert states(adapters) == {"a": "loaded", "b": "loaded", "c": "loading"}
    assert tell(adapters, "c", "loaded") == ["b"]
    assert states(adapters) == {"a": "loaded", "b": "available", "c": "loaded"}
    assert adapters.entries("m")["b"].workers == ()


def test_load_that_fails_costs_no_other_adapter() -> None:
    adapters = registry()
    load(adapters, "a")
    load(adapters, "b")
    adapters.want("m", "c", 0.0)
    assert tell(adapters, "c", "failed", error=FAULT) == []
    assert states(adapters) == {"a": "loaded", "b": "loaded", "c": "failed"}


def test_failed_load_is_tried_again_after_a_cool_down_that_doubles() -> None:
    adapters = registry()
    for now_s, cooldown_s in ((0.0, 30.0), (100.0, 60.0), (200.0, 120.0)):
        assert adapters.want("m", "a", now_s) is not None
        tell(adapters, "a", "failed", error=FAULT, now_s=now_s)
        assert adapters.entries("m")["a"].error == FAULT
        assert adapters.want("m", "a", now_s + cooldown_s - 0.1) is None
    assert adapters.want("m", "a", 320.0) is not None
    assert (adapters.entries("m")["a"].state, adapters.entries("m")["a"].error) == ("loading", None)


def test_load_that_fails_on_one_of_two_workers_is_served_by_the_other() -> None:
    adapters = registry()
    adapters.want("m", "a", 0.0)
    tell(adapters, "a", "loading", 1)
    tell(adapters, "a", "failed", 0, error=to_wire(BadRequest("no")))
    tell(adapters, "a", "loaded", 1)
    assert (adapters.entries("m")["a"].state, adapters.entries("m")["a"].workers) == ("loaded", (1,))


def test_adapter_that_came_too_late_is_unloaded_again() -> None:
    adapters = registry(max_loras=1)
    load(adapters, "a")
    assert load(adapters, "b") == ["a"]
    assert tell(adapters, "a", "loaded") == ["a"], "a second worker had not finished when it lost its place"


def test_resident_adapters_come_back_with_a_worker_that_died() -> None:
    adapters = registry()
    load(adapters, "a")
    adapters.forget(0, None, 5.0, is_kept=True)
    assert states(adapters)["a"] == "loading"
    assert ids(adapters.wanted_of("m")) == ["a"]


def test_adapters_of_a_model_that_was_unloaded_wait_for_a_request() -> None:
    adapters = registry()
    load(adapters, "a")
    adapters.forget(0, "m", 5.0, is_kept=False)
    assert states(adapters)["a"] == "available"
    assert adapters.wanted_of("m") == []


def test_load_over_its_time_has_failed() -> None:
    adapters = registry()
    load(adapters, "b")
    adapters.want("m", "a", 10.0)
    assert adapters.overdue(60.0, 70.0, {"m"}) == []
    assert ids(adapters.overdue(60.0, 70.1, {"m"})) == ["a"]
    entry = adapters.entries("m")["a"]
    assert entry.state == "failed"
    assert entry.error is not None
    assert "not loaded within load_timeout_s (60 s)" in entry.error.message


def test_adapter_from_the_hub_is_not_on_disk_before_it_was_fetched() -> None:
    adapters = AdapterRegistry([AdapterSpec(model="m", id="org/a")], 2, 30.0)
    record = adapters.want("m", "org/a", 0.0)
    assert record is not None
    assert not record.is_on_disk
