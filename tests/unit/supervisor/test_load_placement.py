"""Which workers load a model: named devices, so many of them, or all that have room."""

from __future__ import annotations

import pytest

from sie.catalog.spec import ModelSpec
from sie.config.generation_settings import Generation
from sie.config.sections import Models
from sie.ipc.messages import ModelReport
from sie.supervisor.device_memory import DeviceMemories
from sie.supervisor.devices import WorkerSlot
from sie.supervisor.evictions import Memory
from sie.supervisor.load_placement import leading_slots
from sie.supervisor.model_registry import ModelRegistry
from sie.values.card import ModelCard

GIB = 1 << 30
GPUS = [f"cuda:{number}" for number in range(4)]


class Host:
    """A server's devices, each with 80 GiB, and its models."""

    def __init__(self, devices=GPUS):
        self.devices = devices
        self.memories = DeviceMemories(
            Models(), Generation(), [WorkerSlot(device, memory_bytes=80 * GIB) for device in devices]
        )
        self.registry = ModelRegistry(30.0)
        self.used = dict.fromkeys(range(len(devices)), 0.0)

    def plan(self, record):
        for slot, gib in self.used.items():
            self.memories.report(slot, Memory(80 * GIB, int((80 - gib) * GIB)))
        return self.memories.plan_load(record, self.registry.records.values())

    def add(self, model, gib, *, tensor_parallel=1, **placement):
        card = ModelCard(id=model, kind="generator", num_weights=int(gib * GIB / 2), tensor_parallel=tensor_parallel)
        return self.registry.add(ModelSpec(id=model, **placement), False, card)

    def load(self, record, gib):
        """Load it where the plan says."""
        plan = self.plan(record)
        assert not plan.refusal
        self.registry.want(record.spec.id, 0.0)
        size = record.card.tensor_parallel
        for slot in plan.slots:
            record.apply_at(slot, "ask")
            for state in ("loading", "loaded"):
                report = ModelReport(record.spec.id, state, self.devices[slot], memory_bytes=int(gib / size * GIB))
                self.registry.report(slot, report, 0.0)
            for member in range(slot, slot + size):
                self.used[member] += gib / size
        return plan.slots


def test_a_model_without_wishes_goes_to_all_devices():
    host = Host()
    assert host.load(host.add("m", 16), 16) == (0, 1, 2, 3)


def test_so_many_replicas_go_to_the_emptiest_devices():
    host = Host()
    assert host.load(host.add("a", 40, replicas=2), 40) == (0, 1)
    assert host.load(host.add("b", 30, replicas=1), 30) == (2,)
    assert host.load(host.add("c", 10, replicas=2), 10) == (3, 2)
    assert host.load(host.add("d", 10, replicas=4), 10) == (3, 0, 1, 2)


def test_models_that_do_not_fit_together_are_packed_beside_each_other():
    host = Host()
    host.load(host.add("everywhere", 50), 50)
    assert host.load(host.add("small", 20), 20) == (0, 1, 2, 3)
    host.used[1] = 20
    assert host.plan(host.add("large", 40)).slots == (1,)


def test_where_no_device_has_room_one_makes_it():
    host = Host()
    host.load(host.add("a", 60, devices=("cuda:0",)), 60)
    host.load(host.add("b", 50, devices=("cuda:1", "cuda:2", "cuda:3")), 50)
    plan = host.plan(host.add("large", 40))
    assert (plan.slots, plan.victims, plan.must_wait) == ((1,), {"b": (1,)}, True)


def test_models_of_the_start_get_a_copy_each_before_one_of_them_gets_two():
    host = Host(GPUS[:2])
    large = [host.add(name, 50) for name in "ab"]
    for record in large:
        host.registry.want(record.spec.id, 0.0)
    assert host.load(large[0], 50) == (0,)
    assert host.load(large[1], 50) == (1,)
    assert host.load(host.add("small", 10), 10) == (0, 1)


def test_a_model_that_a_worker_will_load_counts_before_the_worker_is_there():
    host = Host(GPUS[:2])
    first, second = host.add("a", 10, replicas=1), host.add("b", 10, replicas=1)
    for record in (first, second):
        host.registry.want(record.spec.id, 0.0)
        record.slots = host.memories.plan_load(record, host.registry.records.values()).slots
    assert (first.slots, second.slots) == ((0,), (1,))
    assert host.memories.plan_load(host.add("c", 10), host.registry.records.values()).must_wait


def test_a_group_that_has_lost_a_member_gets_nothing():
    host = Host()
    divided = host.add("divided", 100, tensor_parallel=2)
    records = host.registry.records.values()
    assert host.memories.plan_load(divided, records, {1}).slots == (2,)
    assert host.memories.plan_load(divided, records, {1, 2}).slots == (0, 2)
    assert not host.memories.has_place_without(divided, records, {1, 2})


def test_a_model_leaves_a_lost_device_only_for_one_with_room():
    host = Host(GPUS[:2])
    full, lost = host.add("full", 60, devices=("cuda:0",)), host.add("lost", 60, replicas=1)
    host.load(full, 60)
    records = host.registry.records.values()
    assert host.load(lost, 60) == (1,)
    host.plan(lost)
    assert host.memories.has_place_without(lost, records, {1})
    full.is_pinned = True
    assert not host.memories.has_place_without(lost, records, {1})


def test_replicas_on_a_cpu_go_to_the_worker_with_the_least():
    host = Host(["cpu", "cpu"])
    assert host.load(host.add("a", 1, replicas=1), 1) == (0,)
    assert host.load(host.add("b", 1, replicas=1), 1) == (1,)


def test_named_devices_are_all_necessary():
    host = Host()
    named = ("cuda:1", "cuda:3")
    assert host.plan(host.add("m", 16, devices=named)).slots == (1, 3)
    host.registry.records["pinned"] = host.add("pinned", 70, devices=("cuda:3",))
    host.load(host.registry.records["pinned"], 70)
    host.registry.records["pinned"].is_pinned = True
    assert "on cuda:3" in host.plan(host.registry.records["m"]).refusal


def test_a_device_that_is_not_there_is_refused_by_name():
    host = Host()
    assert "this server has no cuda:7, only cuda:0, cuda:1" in host.plan(host.add("m", 1, devices=("cuda:7",))).refusal
    assert "replicas is 5, but only 4 places" in host.plan(host.add("n", 1, replicas=5)).refusal
    assert (
        "tensor_parallel is 3, but there are not 3" in Host(GPUS[:2]).plan(host.add("o", 1, tensor_parallel=3)).refusal
    )


@pytest.mark.parametrize(
    ("size", "named", "slots"),
    [
        (1, (), [0, 1, 2, 3]),
        (2, (), [0, 2]),
        (3, (), [0]),
        (2, ("cuda:1", "cuda:2"), [1]),
        (2, ("cuda:1", "cuda:3"), []),
    ],
)
def test_groups_are_neighbours_and_do_not_overlap(size, named, slots):
    assert leading_slots(GPUS, size, named) == slots


def test_a_group_takes_a_part_of_the_memory_of_each_member():
    host = Host()
    assert host.load(host.add("divided", 100, tensor_parallel=2, replicas=1), 100) == (0,)
    assert host.load(host.add("b", 40, replicas=1), 40) == (2,)
    assert host.plan(host.add("c", 30)).slots == (3, 2)
    wide = host.add("wide", 140, tensor_parallel=2)
    assert (host.plan(wide).slots, host.plan(wide).victims) == ((2,), {"b": (2, 3)})
    host.registry.records["b"].is_pinned = True
    assert (host.plan(wide).slots, host.plan(wide).victims) == ((0,), {"divided": (0, 1)})
    host.registry.records["divided"].is_pinned = True
    assert "on cuda:" in host.plan(wide).refusal


def test_a_member_that_waits_for_memory_makes_its_group_wait():
    host = Host()
    divided = host.add("divided", 100, tensor_parallel=2, replicas=1)
    host.registry.want("divided", 0.0)
    divided.apply_at(0, "ask")
    assert host.plan(host.add("b", 10, devices=("cuda:1",))).must_wait
    assert not host.plan(host.add("c", 10, devices=("cuda:2",))).must_wait


def test_the_workers_of_a_cpu_have_names_of_their_own():
    host = Host(["cpu", "cpu", "cpu"])
    assert host.plan(host.add("m", 1, devices=("cpu:2",))).slots == (2,)
    assert host.plan(host.add("n", 1, replicas=2)).slots == (0, 1)
    assert host.plan(host.add("o", 1)).slots == (0, 1, 2)
    assert host.plan(host.add("p", 1, tensor_parallel=2)).slots == (0,)
