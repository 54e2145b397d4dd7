"""Keeps every work item of this gateway until it is answered or its deadline has passed, and publishes it again if lost.

The first result of an item counts; later ones, of copies and of redelivered items, are dropped. A request is answered
when all its items are, or with the error of its first item that failed, as a host itself would answer.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.gateway.answer_rate import AnswerRate, retry_after_s
from sie.cluster.gateway.placement import Placement
from sie.cluster.payloads import VERSION, DeadLetter, ItemOperation, Result, Taken, Work, encode
from sie.cluster.subjects import Lane, dead_subject, work_subject
from sie.runtime.logs import get_logger
from sie.values.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    Overloaded,
    PoisonInput,
    ProtocolError,
    SieError,
    Unavailable,
    from_wire,
)

_log = get_logger(__name__)
_MAX_LOSSES: Final = 3
_RETRY_S: Final = 0.5
_MAX_AT_ONCE: Final = 256


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

    def __init__(self, items: list[Item], deadline_ns: int, join: Join) -> None:
        self.items = items
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
        """Take in an item's result. Return whether the request is over: all are there, or the first that failed is."""
        self.results[index] = result
        while self._next < len(self.results) and (known := self.results[self._next]) is not None:
            if known.error is not None:
                return True
            self._next += 1
        return self._next == len(self.results)

    def failure(self) -> SieError | None:
        """Return the error of the first item that failed, in the words of the whole request."""
        for index, result in enumerate(self.results):
            if result is not None and result.error is not None:
                return named_item(from_wire(result.error), index)
        return None


class Item:
    """One work item until its result."""

    __slots__ = (
        "index",
        "lane",
        "lost_with",
        "num_published",
        "pending",
        "placement",
        "sequence",
        "stored",
        "taken_by",
        "work",
    )

    def __init__(self, work: Work, lane: Lane, placement: Placement | None, index: int) -> None:
        self.work = work
        self.lane = lane
        self.placement = placement or Placement(lane.pool, "", lane.lease)
        """Where its client wants it to run."""
        self.index = index
        self.pending: RemotePending
        self.num_published = 0
        self.sequence = 0
        self.stored = work.stored
        self.taken_by = ""
        self.lost_with: set[str] = set()
        """Hosts that fell silent while they ran it."""


class FlightMetrics(Protocol):
    """What is counted here; durations in seconds."""

    record_wait: Callable[[float], None]

    def record_items(self, lane: Lane, model: str, num_items: int) -> None:
        """Count a request by the number of its items."""
        ...

    def record_published(self, operation: str, duration_s: float) -> None:
        """Count an item that NATS has confirmed."""
        ...

    def record_dead(self, lane: Lane, model: str) -> None:
        """Count an item that is not tried again."""
        ...


class InFlight:
    """The unanswered work items of one gateway process."""

    def __init__(
        self, connection: Connection, gateway: str, reply_to: str, max_items: int, metrics: FlightMetrics | None = None
    ) -> None:
        self._metrics = metrics
        self._connection = connection
        self._gateway = gateway
        self._reply_to = reply_to
        self._max_items = max_items
        self._items: dict[str, Item] = {}
        self._pending: set[RemotePending] = set()
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.by_lane: Counter[Lane] = Counter()
        self.num_duplicates = 0
        self._rates: defaultdict[str, AnswerRate] = defaultdict(AnswerRate)
        """How fast each pool answers."""

    @property
    def num_pending(self) -> int:
        """Requests that are not answered."""
        return len(self._pending)

    @property
    def num_items(self) -> int:
        """Items that are not answered."""
        return len(self._items)

    def check_room(self, num_items: int = 1) -> None:
        """Raise Overloaded if so many items more would be over `max_in_flight`."""
        if self._items and len(self._items) + num_items > self._max_items:
            text = f"The gateway holds max_in_flight ({self._max_items}) work items"
            raise Overloaded(text, retry_after_s=self._retry_after_s(len(self._items), self._rates.values()))

    def _retry_after_s(self, num_waiting: int, rates: Iterable[AnswerRate]) -> int:
        return retry_after_s(num_waiting, sum(rate.per_s() for rate in rates))

    def _refused_by_pool(self, pool: str, error: SieError) -> SieError:
        """Return an error of publishing; where a pool takes no more, with the time until what waits there is answered."""
        if not isinstance(error, Overloaded):
            return error
        num_waiting = sum(count for lane, count in self.by_lane.items() if lane.pool == pool)
        rates = [self._rates[pool]] if pool in self._rates else []
        return Overloaded(error.message, retry_after_s=self._retry_after_s(num_waiting, rates))

    def submit(
        self, lane: Lane, operation: ItemOperation, model: str, bodies: Sequence[bytes], *, deadline_ns: int,
        join: Join, placement: Placement | None = None,
    ) -> RemotePending:  # fmt: skip
        """Publish the items of a request; deadline_ns is local. Raises Overloaded."""
        self.check_room(len(bodies))
        if self._metrics is not None:
            self._metrics.record_items(lane, model, len(bodies))
        number = next(self._numbers)
        deadline = self._connection.clock.to_server(deadline_ns)
        items: list[Item] = []
        for index, body in enumerate(bodies):
            name = f"{self._gateway}-{number}-{index}"
            work = Work(VERSION, name, self._reply_to, deadline, operation, model, memoryview(body))
            items.append(Item(work, lane, placement, index))
        pending = RemotePending(items, deadline_ns, join)
        self._pending.add(pending)
        pending.future.add_done_callback(lambda _: self._forget(pending))
        for item in items:
            item.pending = pending
            self._items[item.work.id] = item
            self.by_lane[lane] += 1
            self._spawn(self._publish(item))
        return pending

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- publishing -----------------------------------------------------------------------------------------------

    async def _publish(self, item: Item) -> None:
        """Publish an item, and try again while NATS cannot take it. A full stream or store ends its request."""
        while item.work.id in self._items:
            try:
                await self._publish_once(item)
                return
            except Unavailable:
                if not self._connection.is_connected:
                    return  # `publish_again` follows
                await asyncio.sleep(_RETRY_S)
            except SieError as error:
                self.abandon(item.pending, self._refused_by_pool(item.lane.pool, error))
                return
            except Exception:
                _log.exception("work item %s cannot be published", item.work.id)
                self.abandon(item.pending, Internal("internal error"))
                return

    async def _publish_once(self, item: Item) -> None:
        work, pool = item.work, item.lane.pool
        await self._connection.join_pool(pool)
        if len(work.body) > INLINE_BYTES - len(work.reply_to) and not item.stored:
            item.stored = await self._connection.keep(pool, work.id, work.body)
        if item.stored:
            work = Work(
                VERSION, work.id, work.reply_to, work.deadline_ns, work.operation, work.model, stored=item.stored
            )
        item.num_published += 1
        message_id = f"{work.id}.{item.num_published}"
        began_s = time.monotonic()
        item.sequence = await self._connection.enqueue(
            pool, work_subject(item.lane, work.model), encode(work), message_id
        )
        if self._metrics is not None:
            self._metrics.record_published(work.operation, time.monotonic() - began_s)

    async def publish_again(self) -> None:
        """Publish every unanswered item again: a reconnect may have lost the item, or its result."""
        items = list(self._items.values())
        for start in range(0, len(items), _MAX_AT_ONCE):
            batch = items[start : start + _MAX_AT_ONCE]
            for item in batch:
                item.stored = ""  # a restarted server may have lost the payload, too
            await asyncio.gather(*map(self._publish, batch))

    def waiting(self) -> dict[tuple[Lane, str, Placement], list[Item]]:
        """Return the unanswered items by lane, model and wanted placement."""
        found: defaultdict[tuple[Lane, str, Placement], list[Item]] = defaultdict(list)
        for item in self._items.values():
            found[item.lane, item.work.model, item.placement].append(item)
        return dict(found)

    def move(self, items: Sequence[Item], lane: Lane) -> None:
        """Publish items in another lane, because theirs has no host left."""
        for item in items:
            self.by_lane[item.lane] -= 1
            if item.sequence:
                self._spawn(self._connection.remove(item.lane.pool, item.sequence))
            item.lane, item.stored = lane, ""
            self.by_lane[lane] += 1
            self._spawn(self._publish(item))

    # --- results --------------------------------------------------------------------------------------------------

    async def on_result(self, result: Result) -> None:
        """Take in a result; of several for one item the first counts."""
        item = self._items.get(result.id)
        if item is None:
            self.num_duplicates += 1
            return
        if result.stored:
            self._spawn(self._fetch(item, result))
            return
        self._answer(item, result)

    async def _fetch(self, item: Item, result: Result) -> None:
        try:
            reply = await self._connection.fetch(item.lane.pool, result.stored)
        except SieError as error:
            _log.warning("the result of %s is lost: %s; publishing it again", item.work.id, error.message)
            await self._publish(item)
            return
        await self._connection.forget(item.lane.pool, result.stored)
        self._answer(item, Result(
            VERSION, result.id, result.host, None, memoryview(reply), "", result.num_tokens, result.image_tokens,
            result.tokenization_ns, result.queue_ns, result.cuts,
        ))  # fmt: skip

    def _answer(self, item: Item, result: Result) -> None:
        if self._drop(item) is None:
            return
        self._rates[item.lane.pool].count()
        pending = item.pending
        if not pending.take(item.index, result) or pending.future.done():
            return
        error = pending.failure()
        if error is not None:
            self.abandon(pending, error)
            return
        if self._metrics is not None:
            self._metrics.record_wait((time.monotonic_ns() - pending.submitted_ns) / 1e9)
        results = [known for known in pending.results if known is not None]
        try:
            pending.future.set_result(pending.join(results, pending.submitted_ns))
        except (ProtocolError, ValueError) as fault:
            _log.error("the results of a request do not fit together: %s", fault)
            pending.future.set_exception(Internal("a host's reply could not be read"))

    def _drop(self, item: Item) -> Item | None:
        """Forget an item, and delete its payload. Returns None if it was forgotten before."""
        known = self._items.pop(item.work.id, None)
        if known is not None:
            self.by_lane[item.lane] -= 1
            if item.stored:
                self._spawn(self._connection.forget(item.lane.pool, item.stored))
        return known

    def on_taken(self, taken: Taken) -> None:
        """Note which host runs items."""
        for name in taken.ids:
            item = self._items.get(name)
            if item is not None:
                item.taken_by = taken.host
                item.lost_with.discard(taken.host)

    # --- ends -----------------------------------------------------------------------------------------------------

    def abandon(self, pending: RemotePending, error: SieError) -> None:
        """End a request with an error. Its items that no host has taken leave the stream."""
        if not pending.future.done():
            pending.future.set_exception(error)
            pending.future.exception()  # a caller may have gone; asyncio would report it as never retrieved

    def _forget(self, pending: RemotePending) -> None:
        self._pending.discard(pending)
        for item in pending.items:
            if self._drop(item) is not None and item.sequence and not item.taken_by and self._connection.is_connected:
                self._spawn(self._connection.remove(item.lane.pool, item.sequence))

    def expire(self, now_ns: int) -> None:
        """End the requests whose deadline has passed."""
        for pending in [pending for pending in self._pending if pending.deadline_ns <= now_ns]:
            self.abandon(pending, DeadlineExceeded("the request's deadline passed before its answer was there"))

    def on_silent(self, silent: set[str]) -> None:
        """Count the losses of items whose hosts fell silent; an item that was lost with three hosts is not tried again.

        The stream delivers such an item to another host by itself, since nobody acknowledges it.
        """
        for item in list(self._items.values()):
            if item.taken_by in silent and item.taken_by not in item.lost_with:
                item.lost_with.add(item.taken_by)
                if len(item.lost_with) >= _MAX_LOSSES:
                    self._spawn(self._bury(item))

    def on_returned(self, host: str) -> None:
        """Take back the losses of a host that beats again: it was only unreachable."""
        for item in self._items.values():
            item.lost_with.discard(host)

    async def _bury(self, item: Item) -> None:
        text = f"This input was running on {_MAX_LOSSES} hosts when they were lost; it is not tried again"
        letter = DeadLetter(VERSION, item.work, text, sorted(item.lost_with))
        self.abandon(item.pending, PoisonInput(text))
        if self._metrics is not None:
            self._metrics.record_dead(item.lane, item.work.model)
        await self._connection.remove(item.lane.pool, item.sequence)
        subject = dead_subject(item.lane, item.work.model)
        try:
            await self._connection.enqueue(item.lane.pool, subject, encode(letter), f"dead.{item.work.id}")
        except SieError as error:
            _log.error("work item %s could not be kept as a dead letter: %s", item.work.id, error.message)

    def fail_all(self, error: SieError) -> None:
        """End every request, when the process ends."""
        for pending in list(self._pending):
            self.abandon(pending, error)


def named_item(error: SieError, index: int) -> SieError:
    """Return an error about the only item of a work item as one about its place in the request."""
    if index and isinstance(error, BadRequest):
        message = error.message.replace("$.items[0]", f"$.items[{index}]").replace("item 0 has", f"item {index} has")
        return type(error)(
            message, code=error.code, http_status=error.http_status, retry_after_s=error.retry_after_s,
            extras=error.extras,
        )  # fmt: skip
    return error
