from __future__ import annotations

import pytest

from sie.config.generation_settings import Generation
from sie.supervisor.evictions import (
    Memory,
    Policy,
    Tenant,
    claim_of,
    is_under_pressure,
    least_recently_used,
    plan_evictions,
)
from sie.values.card import ModelCard, StubOptions
from sie.values.generate import GenerateRule

POLICY = Policy(pressure_pct=90.0)
LIMITED = Policy(pressure_pct=100.0, max_model_bytes=100)


def tenant(model: str, nbytes: int = 10, used_s: float = 0.0, *, pinned: bool = False) -> Tenant:
    return Tenant(model=model, nbytes=nbytes, last_used_s=used_s, is_pinned=pinned)


def test_nothing_goes_where_there_is_room():
    assert plan_evictions(POLICY, Memory(1000, 200), [tenant("a")], 100) == ([], 0)
    assert plan_evictions(LIMITED, None, [tenant("a", 60)], 40) == ([], 0)


def test_least_recently_used_go_first_and_no_more_than_must():
    tenants = [tenant("new", 50, 3.0), tenant("old", 50, 1.0), tenant("middle", 50, 2.0)]
    assert plan_evictions(POLICY, Memory(1000, 200), tenants, 101) == (["old"], 0)
    assert plan_evictions(POLICY, Memory(1000, 200), tenants, 151) == (["old", "middle"], 0)


def test_pinned_models_stay_and_the_remaining_shortage_is_returned():
    tenants = [tenant("pinned", 500, 1.0, pinned=True), tenant("loose", 50, 2.0)]
    assert plan_evictions(POLICY, Memory(1000, 100), tenants, 80) == (["loose"], 30)


def test_model_that_takes_nothing_is_not_worth_unloading():
    assert plan_evictions(LIMITED, None, [tenant("stub", 0, 1.0), tenant("a", 60, 2.0)], 50) == (["a"], 0)


def test_limit_counts_models_and_measurement_counts_everything():
    assert plan_evictions(LIMITED, Memory(10_000, 10_000), [tenant("a", 60)], 41) == (["a"], 0)
    both = Policy(pressure_pct=100.0, max_model_bytes=1000)
    assert plan_evictions(both, Memory(10_000, 30), [tenant("a", 60)], 41) == (["a"], 0)


@pytest.mark.parametrize(("available", "expected"), [(101, False), (100, False), (99, True), (0, True)])
def test_pressure_begins_over_the_share(available, expected):
    assert is_under_pressure(POLICY, Memory(1000, available)) is expected
    assert not is_under_pressure(POLICY, None)


def test_victim_is_the_least_recently_used_that_is_not_pinned():
    tenants = [tenant("a", used_s=3.0), tenant("b", used_s=1.0, pinned=True), tenant("c", used_s=2.0)]
    assert least_recently_used(tenants) == "c"
    assert least_recently_used(tenants[1:2]) is None


@pytest.mark.parametrize(
    ("device", "dtype", "width"),
    [
        ("cpu", "bfloat16", 4),
        ("cpu", "auto", 4),
        ("cuda:0", "auto", 2),
        ("cuda:0", "float32", 4),
        ("cuda:1", "float16", 2),
    ],
)
def test_estimate_is_the_peak_of_the_load(device, dtype, width):
    assert (
        claim_of(ModelCard(id="m", kind="encoder", num_weights=1000), device, dtype, Generation()).least_bytes
        == 1000 * width
    )
    assert (
        claim_of(ModelCard(id="m", kind="stub", stub=StubOptions(memory_mb=3)), device, dtype, Generation()).least_bytes
        == 3 << 20
    )


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", {}, 4000),
        ("cuda:0", {}, 2000 + 8192 * 10),
        ("cuda:0", {"max_context_tokens": 100}, 2000 + 100 * 10),
        ("cuda:0", {"kv_cache_bytes": 7}, 2000 + 7),
    ],
)
def test_a_generating_model_needs_keys_and_values_of_a_sequence_on_a_gpu(device, settings, expected):
    rule = GenerateRule(context_length=1 << 17, kv_token_bytes=10)
    card = ModelCard(id="m", kind="generator", num_weights=1000, generate=rule)
    assert claim_of(card, device, "auto", Generation(**settings)).least_bytes == expected
