from __future__ import annotations

from sie.supervisor.core_lending import plan_lending
from sie.supervisor.core_shares import CorePlace
from sie.supervisor.devices import WorkerSlot


def cpu(*cores: int) -> WorkerSlot:
    return WorkerSlot("cpu", cores)


def numbers(workers: list[WorkerSlot], places: dict[int, CorePlace] | None = None) -> dict[int, list[int]]:
    return {slot: [core.number for core in lent] for slot, lent in plan_lending(workers, places or {}).items()}


def test_each_worker_begins_with_the_cores_of_the_next():
    assert numbers([cpu(0), cpu(1), cpu(2)]) == {0: [1, 2], 1: [2, 0], 2: [0, 1]}


def test_a_core_is_named_with_its_owner_and_its_place_on_the_board():
    lent = plan_lending([cpu(4, 5), cpu(6, 7)], {})
    assert [(core.number, core.owner, core.index) for core in lent[0]] == [(6, 1, 2), (7, 1, 3)]
    assert [(core.number, core.owner, core.index) for core in lent[1]] == [(4, 0, 0), (5, 0, 1)]


def test_cores_of_another_memory_node_are_not_lent():
    places = {core: CorePlace(core // 2, core // 2, core) for core in range(4)}
    assert numbers([cpu(0), cpu(1), cpu(2), cpu(3)], places) == {0: [1], 1: [0], 2: [3], 3: [2]}


def test_first_threads_of_other_cores_come_first_and_the_own_core_s_last():
    places = {core: CorePlace(0, 0, core % 3) for core in range(6)}
    assert numbers([cpu(core) for core in range(6)], places)[0] == [1, 2, 4, 5, 3]


def test_one_worker_has_nobody_to_borrow_from():
    assert numbers([cpu(0, 1)]) == {0: []}


def test_a_core_of_two_workers_is_not_lent():
    assert numbers([cpu(0), cpu(1), cpu(0)]) == {1: []}


def test_workers_of_gpus_neither_lend_nor_borrow():
    assert numbers([WorkerSlot("cuda:0", (0,)), cpu(1), cpu(2)]) == {1: [2], 2: [1]}
    assert numbers([WorkerSlot("cuda:0", (0,)), WorkerSlot("cuda:1", (1,))]) == {}


def test_workers_that_are_not_pinned_lend_nothing():
    assert numbers([cpu(), cpu()]) == {}
