"""Orders the work items that wait in a gateway: API keys take turns by their weights. Pure.

Start-time fair queueing: each item has a start and a finish on a virtual clock, a key's next item starts where its last
one finished, and the smallest start is next. A key that was idle starts at the present, so it saves up nothing. Source:
Goyal, Vin and Cheng, "Start-time Fair Queueing", 1996.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")


class Caller(NamedTuple):
    """The API key of a request; one without a name is everybody without a key."""

    name: str = ""
    weight: int = 1


EVERYBODY: Final = Caller()


class _Flow(Generic[ItemT]):
    """The waiting items of one key in order, each with its cost; start is that of the first."""

    __slots__ = ("items", "start", "weight")

    def __init__(self) -> None:
        self.items: dict[ItemT, float] = {}
        self.start = 0.0
        self.weight = 1


class FairQueue(Generic[ItemT]):
    """The waiting items of one lane and model."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow[ItemT]] = {}
        self._now = 0.0
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def add(self, caller: Caller, item: ItemT, cost: float) -> None:
        """Add an item behind the others of its key."""
        flow = self._flows.setdefault(caller.name, _Flow())
        flow.weight = caller.weight
        if not flow.items:
            flow.start = max(flow.start, self._now)
        flow.items[item] = cost
        self._num_items += 1

    def discard(self, caller: Caller, item: ItemT) -> None:
        """Remove an item, if it is there."""
        flow = self._flows.get(caller.name)
        if flow is not None and flow.items.pop(item, None) is not None:
            self._count_out()

    def pop(self) -> ItemT:
        """Return the next item. Raises ValueError if none waits."""
        flow = min(self._waiting(), key=lambda flow: flow.start)
        item, cost = next(iter(flow.items.items()))
        del flow.items[item]
        self._now = flow.start
        flow.start += cost / flow.weight
        self._count_out()
        return item

    def weight(self) -> int:
        """Return the weights of the keys that wait, together."""
        return sum(flow.weight for flow in self._waiting())

    def num_before(self, caller: Caller) -> float:
        """Return how many items will be taken before a new one of a key, as if all cost the same."""
        own = self._flows.get(caller.name)
        num_own = len(own.items) + 1 if own is not None else 1
        turns = num_own / caller.weight
        return sum(
            min(len(flow.items), turns * flow.weight) for name, flow in self._flows.items() if name != caller.name
        ) + (num_own - 1)

    def _waiting(self) -> Iterator[_Flow[ItemT]]:
        return (flow for flow in self._flows.values() if flow.items)

    def _count_out(self) -> None:
        self._num_items -= 1
        if not self._num_items:  # an empty queue remembers nobody
            self._flows.clear()
            self._now = 0.0
