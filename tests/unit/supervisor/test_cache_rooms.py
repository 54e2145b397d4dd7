"""How generating models share a GPU's memory: the supervisor's plan and the size that a worker takes, without a GPU."""

from __future__ import annotations

import msgspec
import pytest

from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.ipc.messages import CacheRoom, MemoryReport, ModelReport
from sie.supervisor.cache_rooms import plan_cache_room
from sie.supervisor.device_memory import DeviceMemories
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.evictions import Claim, Memory, Policy
from sie.supervisor.model_registry import ModelRegistry
from sie.values.card import ModelCard
from sie.values.generate import GenerateRule
from sie.workers.generation.cache_size import plan_cache_bytes

GIB = 1 << 30
TOTAL = 80 * GIB
CONTEXT_BYTES = GIB
"""What a process takes of a GPU for itself."""
STEP_BYTES = 2 * GIB
EIGHT_B = (8_030_000_000, 131_072)
SEVENTY_B = (70_600_000_000, 327_680)
ENCODER = (560_000_000, 0)


class Gpus:
    """GPUs of 80 GiB, the supervisor's view of them, and workers that size their caches as real ones do."""

    def __init__(self, num=1, *, generation=None, **models):
        self.names = [f"cuda:{number}" for number in range(num)]
        self.generation = generation or Generation()
        places = [WorkerSlot(name, memory_bytes=TOTAL) for name in self.names]
        self.memories = DeviceMemories(Models(**models), self.generation, places)
        self.registry = ModelRegistry(30.0)
        self.used = [CONTEXT_BYTES] * num
        self.measure()

    @property
    def records(self):
        return self.registry.records.values()

    def measure(self):
        for slot, used in enumerate(self.used):
            self.memories.report(slot, Memory(TOTAL, TOTAL - used))

    def add(self, model, size, *, is_preloaded=False, tensor_parallel=1, **placement):
        num_weights, token_bytes = size
        rule = GenerateRule(context_length=131_072, kv_token_bytes=token_bytes) if token_bytes else None
        kind = "generator" if rule else "encoder"
        card = ModelCard(
            id=model, kind=kind, num_weights=num_weights, generate=rule, tensor_parallel=tensor_parallel
        )  # fmt: skip
        return self.registry.add(ModelSpec(id=model, **placement), is_preloaded, card)

    def ask(self, record):
        """Do what the supervisor does before it sends a load. Return the rooms of the workers that get it."""
        self.registry.want(record.spec.id, 0.0)
        plan = self.memories.plan_load(record, self.records)
        assert (plan.refusal, plan.victims, plan.must_wait) == ("", {}, False)
        record.slots = plan.slots
        for slot in plan.slots:
            record.apply_at(slot, "ask")
        return self.memories.cache_rooms(record, plan.slots, self.records)

    def take(self, record, slot, room):
        """Do what a worker does. Return the tokens that its cache holds."""
        rule, size = record.card.generate, record.card.tensor_parallel
        members = range(slot, slot + size)
        weights = 2 * record.card.num_weights // size
        for member in members:
            self.used[member] += weights
        cache = token_bytes = 0
        if rule is not None:
            token_bytes = rule.kv_token_bytes // size
            share, least = self.generation.kv_cache_share, self.generation.kv_cache_min_tokens * token_bytes
            free = [MemoryReport(TOTAL, TOTAL - self.used[member]) for member in members]
            cache = min(plan_cache_bytes(one, STEP_BYTES, share, room, least) for one in free)
            cache = self.generation.kv_cache_bytes or cache
        for member in members:
            self.used[member] += cache
        for state in ("loading", "loaded"):
            report = ModelReport(record.spec.id, state, self.names[slot], memory_bytes=weights + cache)
            self.registry.report(slot, report, 0.0)
        self.measure()
        assert all(used <= 0.95 * TOTAL for used in self.used)
        return cache // token_bytes if token_bytes else 0

    def load(self, record):
        """Load a model where the plan says, without an eviction. Return the tokens of the smallest cache."""
        return min(self.take(record, slot, room) for slot, room in self.ask(record).items())


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize(("preloaded", "lazy"), [("ab", ""), ("a", "b"), ("", "ab")])
def test_two_generators_that_fit_beside_each_other_both_load(order, preloaded, lazy):
    gpus = Gpus()
    records = {name: gpus.add(name, EIGHT_B, is_preloaded=name in preloaded) for name in preloaded + lazy}
    tokens = [gpus.load(records[name]) for name in order]
    assert min(tokens) > 100_000
    assert max(tokens) < 2 * min(tokens)


def test_a_generator_alone_keeps_all():
    gpus = Gpus()
    (room,) = gpus.ask(gpus.add("a", EIGHT_B)).values()
    assert room == CacheRoom(pressure_pct=95.0)


def test_a_generator_leaves_an_encoder_its_weights_and_no_more():
    gpus = Gpus()
    generator, encoder = gpus.add("a", EIGHT_B, is_preloaded=True), gpus.add("e", ENCODER)
    (room,) = gpus.ask(generator).values()
    assert (room.reserved_bytes, room.share) == (2 * ENCODER[0], 1.0)
    assert gpus.take(generator, 0, room) > 400_000
    gpus.load(encoder)


def test_caches_of_models_of_several_sizes_hold_as_many_tokens():
    gpus = Gpus()
    small, large = (gpus.add(name, size, is_preloaded=True) for name, size in (("s", (10**9, 16_384)), ("l", EIGHT_B)))
    assert gpus.load(small) == pytest.approx(gpus.load(large), rel=0.15)


def test_a_third_that_does_not_fit_is_refused_with_the_settings_that_give_it_room():
    gpus = Gpus()
    pair = [gpus.add(name, EIGHT_B, is_preloaded=True) for name in "ab"]
    third = gpus.add("c", (30_000_000_000, 131_072), is_preloaded=True)
    for record in pair:
        gpus.load(record)
    refusal = gpus.memories.plan_load(third, gpus.records).refusal
    assert "on cuda:0" in refusal
    for setting in ("memory_pressure_pct", "kv_cache_share", "kv_cache_bytes"):
        assert setting in refusal


@pytest.mark.parametrize(("share", "least_part"), [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5)])
def test_lazy_models_never_cost_a_cache_more_than_their_share(share, least_part):
    def tokens(num_lazy):
        gpus = Gpus(generation=Generation(kv_cache_lazy_share=share))
        for number in range(num_lazy):
            gpus.add(f"lazy {number}", (2_000_000_000, 65_536))
        return gpus.load(gpus.add("a", EIGHT_B, is_preloaded=True))

    assert tokens(9) >= least_part * tokens(0)
    assert (tokens(9) < tokens(0)) == bool(share)


def test_a_lazy_model_that_could_not_fit_costs_nothing():
    gpus = Gpus()
    gpus.add("huge", SEVENTY_B)
    (room,) = gpus.ask(gpus.add("a", EIGHT_B)).values()
    assert room == CacheRoom(pressure_pct=95.0)


def test_a_model_that_is_loaded_or_refused_for_good_or_goes_elsewhere_costs_nothing():
    gpus = Gpus(2)
    gpus.load(gpus.add("loaded", ENCODER))
    gpus.add("elsewhere", EIGHT_B, devices=("cuda:1",))
    gpus.add("refused", EIGHT_B).retry_at_s = float("inf")
    rooms = gpus.ask(gpus.add("a", EIGHT_B))
    assert rooms[0] == CacheRoom(pressure_pct=95.0)
    assert rooms[1].reserved_bytes > 2 * EIGHT_B[0]


def test_a_model_of_one_replica_costs_memory_on_the_emptiest_device_only():
    gpus = Gpus(2)
    gpus.load(gpus.add("loaded", ENCODER, devices=("cuda:0",)))
    single = gpus.add("single", EIGHT_B, replicas=1, is_preloaded=True)
    everywhere = gpus.add("everywhere", EIGHT_B, is_preloaded=True)
    rooms = gpus.ask(everywhere)
    assert [rooms[slot].share for slot in (0, 1)] == [1.0, 0.5]
    for slot, room in rooms.items():
        gpus.take(everywhere, slot, room)
    assert list(gpus.ask(single)) == [1]


def test_a_group_leaves_on_all_members_what_the_fullest_must():
    gpus = Gpus(2)
    divided = gpus.add("divided", SEVENTY_B, tensor_parallel=2, is_preloaded=True)
    small = gpus.add("small", (1_000_000_000, 32_768), devices=("cuda:1",), is_preloaded=True)
    assert gpus.ask(divided)[0] == CacheRoom(95.0, 2_000_000_000, 163_840 / (163_840 + 32_768))
    gpus.take(divided, 0, CacheRoom(95.0, 2_000_000_000, 163_840 / (163_840 + 32_768)))
    assert gpus.load(small) > 8192


@pytest.mark.parametrize(("cache_bytes", "waits"), [(0, True), (5 * GIB, False)])
def test_only_a_cache_that_is_divided_waits_for_the_sizes_of_other_models(cache_bytes, waits):
    gpus = Gpus(generation=Generation(kv_cache_bytes=cache_bytes))
    first, encoder = gpus.add("a", EIGHT_B, is_preloaded=True), gpus.add("e", ENCODER, is_preloaded=True)
    late = gpus.registry.add(ModelSpec(id="hub"), True, None)
    assert gpus.memories.is_early(first, gpus.records) is waits
    assert not gpus.memories.is_early(encoder, gpus.records)
    late.card = encoder.card
    assert not gpus.memories.is_early(first, gpus.records)


def test_caches_of_a_fixed_size_are_left_whole():
    gpus = Gpus(generation=Generation(kv_cache_bytes=5 * GIB))
    first, second = (gpus.add(name, EIGHT_B, is_preloaded=True) for name in "ab")
    assert gpus.ask(first)[0].reserved_bytes == 2 * EIGHT_B[0] + 5 * GIB
    gpus.take(first, 0, CacheRoom())
    gpus.load(second)


def test_a_cache_stays_below_the_limit_of_all_models_too():
    gpus = Gpus(max_model_bytes=40 * GIB)
    first, second = (gpus.add(name, EIGHT_B, is_preloaded=True) for name in "ab")
    gpus.load(first)
    gpus.load(second)


def test_a_restarted_worker_gets_its_models_with_the_same_division():
    gpus = Gpus()
    pair = [gpus.add(name, EIGHT_B, is_preloaded=True) for name in "ab"]
    before = [gpus.load(record) for record in pair]
    gpus.registry.forget_worker(0, 0.0, blame=False)
    gpus.memories.forget_worker(0)
    rooms = []
    for record in pair:  # both are sent at once
        record.apply_at(0, "ask")
        rooms += gpus.memories.cache_rooms(record, [0], gpus.records).values()
    gpus.used = [CONTEXT_BYTES]
    assert [gpus.take(record, 0, room) for record, room in zip(pair, rooms, strict=True)] == before


def test_a_successor_beside_the_serving_copy_leaves_nothing_to_others():
    gpus = Gpus()
    serving = gpus.add("a", EIGHT_B)
    gpus.load(serving)
    gpus.add("b", EIGHT_B)
    assert gpus.memories.cache_rooms(serving, [0], gpus.records) == {0: CacheRoom(pressure_pct=95.0)}


def test_workers_of_a_cpu_divide_nothing():
    memories = DeviceMemories(Models(), Generation(), [WorkerSlot("cpu"), WorkerSlot("cpu")])
    registry = ModelRegistry(30.0)
    card = ModelCard(
        id="a", kind="generator", num_weights=10, generate=GenerateRule(context_length=9, kv_token_bytes=9)
    )
    first, _ = (registry.add(ModelSpec(id=name), True, msgspec.structs.replace(card, id=name)) for name in "ab")
    memories.report(0, Memory(TOTAL, TOTAL))
    assert memories.cache_rooms(first, [0, 1], registry.records.values()) == dict.fromkeys((0, 1), CacheRoom())


def test_wanted_models_come_first_and_one_that_does_not_fit_is_left_out():
    own, small, large = (Claim(fixed_bytes=size, cache_bytes=1, token_bytes=1) for size in (10, 20, 89))
    policy, memory = Policy(pressure_pct=100.0), Memory(100, 100)
    room = plan_cache_room(policy, memory, own, [large, small], [small], used_bytes=0, lazy_share=0.5)
    assert (room.reserved_bytes, room.share) == (20 + 34, 0.5), "half of the 68 that are left"
