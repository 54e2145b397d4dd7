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
    """Return the cores that each worker's steps may use, by slot; those of the next worker come first.

    So two workers that ask at once begin at different cores. A core that belongs to several workers is not lent, nor does
    anything that is not a CPU's worker lend or borrow. Without places, all cores count as one node.
    """
    owners = Counter(core for worker in workers for core in worker.cores)
    lenders: dict[int, list[LentCore]] = {}
    index = 0
    for slot, worker in enumerate(workers):
        for core in worker.cores:
            if worker.device == "cpu" and owners[core] == 1:
                lenders.setdefault(slot, []).append(LentCore(core, slot, index))
            index += 1
    nodes = {slot: {_node(core.number, places) for core in own} for slot, own in lenders.items()}
    return {
        slot: tuple(
            core
            for step in range(1, len(workers))
            for core in lenders.get((slot + step) % len(workers), ())
            if _node(core.number, places) in nodes[slot]
        )
        for slot in lenders
    }


def _node(core: int, places: Mapping[int, CorePlace]) -> int:
    return places[core].node if core in places else 0
