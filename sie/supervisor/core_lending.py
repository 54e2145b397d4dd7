"""Decides which cores of other workers a CPU worker's steps may use. Pure.

A step reads its weights from its memory node. Over the link to another node, a core adds less than it costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sie.ipc.messages import LentCore
from sie.supervisor.core_shares import CorePlace
from sie.supervisor.devices import WorkerSlot


def plan_lending(workers: Sequence[WorkerSlot], places: Mapping[int, CorePlace]) -> dict[int, tuple[LentCore, ...]]:
    """Return the cores that each worker's steps may use, by slot, the best first.

    A thread beside another one of its core adds little, so the first threads of cores come first, and those beside a thread
    of the worker's own last. Else those of the next worker come first: two workers that ask at once begin at different cores.
    A core that belongs to several workers is not lent. Only CPU workers lend and borrow. Without places, all cores count as
    one node.
    """
    owners = Counter(core for worker in workers for core in worker.cores)
    lenders: dict[int, list[LentCore]] = {}
    index = 0
    for slot, worker in enumerate(workers):
        for core in worker.cores:
            if worker.device == "cpu" and owners[core] == 1:
                lenders.setdefault(slot, []).append(LentCore(core, slot, index))
            index += 1
    threads = _number_threads(places)
    return {slot: _best_first(slot, len(workers), lenders, places, threads) for slot in lenders}


def _best_first(
    slot: int, num_workers: int, lenders: Mapping[int, Sequence[LentCore]], places: Mapping[int, CorePlace],
    threads: Mapping[int, int],
) -> tuple[LentCore, ...]:  # fmt: skip
    own = [core.number for core in lenders[slot]]
    nodes = {_node(core, places) for core in own}
    own_places = {places[core] for core in own if core in places}
    lent = [
        core
        for step in range(1, num_workers)
        for core in lenders.get((slot + step) % num_workers, ())
        if _node(core.number, places) in nodes
    ]
    return tuple(sorted(lent, key=lambda core: (places.get(core.number) in own_places, threads.get(core.number, 0))))


def _number_threads(places: Mapping[int, CorePlace]) -> dict[int, int]:
    """Return which thread of its core each logical core is."""
    counts: Counter[CorePlace] = Counter()
    numbers: dict[int, int] = {}
    for core in sorted(places):
        numbers[core] = counts[places[core]]
        counts[places[core]] += 1
    return numbers


def _node(core: int, places: Mapping[int, CorePlace]) -> int:
    return places[core].node if core in places else 0
