"""A request of a gateway, its work items, and the place of each item's lane and model, where it waits for its turn."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Final

from sie.cluster.gateway.answer_rate import AnswerRate
from sie.cluster.gateway.fair_queue import Caller, FairQueue
from sie.cluster.gateway.requested_placement import Placement
from sie.cluster.payloads import Result, Work
from sie.cluster.subjects import Lane
from sie.values.errors import BadRequest, SieError, from_wire

_INPUT: Final = re.compile(r"(\$\.items\[|\bitem )(\d+)(\]| has)")
_LEAST_S: Final = 1.0
_LONGEST_S: Final = 1.0
"""Seconds: the hosts' rate is known after _LEAST_S of work, and a pause of more than _LONGEST_S is an outage."""


class RemoteReply:
    """A joined reply, in memory of its own."""

    __slots__ = ("num_tokens", "submitted_ns", "view")

    def __init__(self, view: memoryview, num_tokens: int, submitted_ns: int) -> None:
        self.view = view
        self.num_tokens = num_tokens
        self.submitted_ns = submitted_ns

    def release(self) -> None:
        """Let go of the bytes."""
        self.view = memoryview(b"")


Join = Callable[[Sequence[Result], int], RemoteReply]
"""Makes the reply of a request from the results of its items, in order, and the time it was submitted."""


class RemotePending:
    """One request whose items are on their way; the gateway's `Pending`."""

    def __init__(self, items: list[Item], deadline_ns: int, join: Join, caller: Caller) -> None:
        self.items = items
        self.caller = caller
        self.results: list[Result | None] = [None] * len(items)
        self.submitted_ns = time.monotonic_ns()
        self.deadline_ns = deadline_ns
        self.future: asyncio.Future[RemoteReply] = asyncio.get_running_loop().create_future()
        self.join = join
        self._next = 0

    async def reply(self) -> RemoteReply:
        """Wait for the reply. Raises the error that ended the request."""
        return await self.future

    def stop(self, choice: int) -> None:
        """Do nothing: such a request generates no text."""

    def take(self, index: int, result: Result) -> bool:
        """Take in an item's result. Return whether the request is over.

        It is when all results are there, or an error and all results before it.
        """
        self.results[index] = result
        while self._next < len(self.results) and (known := self.results[self._next]) is not None:
            if known.error is not None:
                return True
            self._next += 1
        return self._next == len(self.results)

    def failure(self) -> SieError | None:
        """Return the error of the first item that failed, in the words of the whole request."""
        for item, result in zip(self.items, self.results, strict=True):
            if result is not None and result.error is not None:
                return named_item(from_wire(result.error), item.first)
        return None


class Item:
    """One work item until its result."""

    __slots__ = (
        "first",
        "index",
        "lane",
        "lost_with",
        "parcel",
        "pending",
        "placement",
        "stored",
        "taken_by",
        "work",
    )

    def __init__(self, work: Work, lane: Lane, placement: Placement | None, index: int, first: int) -> None:
        """Take the item's place in its request as `index`, and the number of its first input as `first`."""
        self.work = work
        self.lane = lane
        self.placement = placement or Placement(lane.pool, "", lane.lease)
        """The placement that its client wants."""
        self.index = index
        self.first = first
        self.parcel: Parcel | None = None
        """The message that has it; None while it waits in the gateway."""
        self.pending: RemotePending
        self.stored = work.stored
        self.taken_by = ""
        self.lost_with: set[str] = set()
        """Hosts that fell silent while they ran it."""


class Parcel:
    """One message with work items. It forgets the items that are answered."""

    __slots__ = ("is_taken", "items", "name", "sequence")

    def __init__(self, name: str, items: Sequence[Item]) -> None:
        """Take items over from their parcels. The name never changes, because NATS stores a message once by its name."""
        self.name = name
        self.items = dict.fromkeys(items)
        self.sequence = 0
        """Its number in the stream; 0 until NATS has confirmed it."""
        self.is_taken = False
        """Whether a host has taken it."""
        for item in items:
            if item.parcel is not None:
                del item.parcel.items[item]
            item.parcel = self


class Place:
    """The items of one lane and model: those that wait here, and the number of those that were published."""

    def __init__(self) -> None:
        self.queue: FairQueue[Item] = FairQueue()
        self.num_published = 0
        self.suspects: dict[Item, None] = {}
        """Items that were lost together with hosts, in order. Only the first one is published; the others wait for its end."""
        self.weight = 0
        """The most weight of waiting keys since gateways were told of it."""
        self._busy_s = 0.0
        self._since_s: float | None = None
        self.capacity = AnswerRate(lambda: self._busy_s)
        """The rate of answers while items wait here, which is the most that the hosts can give."""

    def suspect(self) -> Item | None:
        """Return the suspect that is published, or None."""
        return next(iter(self.suspects), None)

    def leave_suspects(self, item: Item) -> bool:
        """Remove an item from the suspects. Return whether it was the published one."""
        is_out = item is self.suspect()
        self.suspects.pop(item, None)
        return is_out

    def look(self, *, is_open: bool) -> None:
        """Note whether items wait for the hosts; is_open: not for NATS."""
        if not (is_open and len(self.queue)):
            self._since_s = None
        elif self._since_s is None:
            self._since_s = time.monotonic()

    def answered(self) -> None:
        """Count an answer. A long silence before it was an outage, and says nothing about what hosts can do."""
        if self._since_s is not None:
            now_s = time.monotonic()
            if now_s - self._since_s <= _LONGEST_S:
                self._busy_s += now_s - self._since_s
                self.capacity.count()
            self._since_s = now_s

    def wait_s(self, caller: Caller) -> float:
        """Return how long a new item of a key will wait for its turn; 0 if that is not known."""
        if self._since_s is None or self._busy_s < _LEAST_S:
            return 0.0
        return self.queue.num_before(caller) / self.capacity.per_s()


def named_item(error: SieError, first: int) -> SieError:
    """Return a work item's error with the numbers of inputs as its request has them; first is that of the item's first one."""
    if first and isinstance(error, BadRequest):
        message = _INPUT.sub(lambda found: f"{found[1]}{int(found[2]) + first}{found[3]}", error.message)
        return type(error)(
            message, code=error.code, http_status=error.http_status, retry_after_s=error.retry_after_s,
            extras=error.extras,
        )  # fmt: skip
    return error
