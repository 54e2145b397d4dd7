"""Keeps every work item of this gateway until it is answered or its deadline has passed, and publishes it again if lost.

The first result of an item counts; later ones, of copies and of redelivered items, are dropped. A request is answered
when all its items are, or with the error of its first item that failed, as a host itself would answer.

NATS gets about as many items as the hosts have room for; the others wait here, where API keys take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.dead_letters import bury
from sie.cluster.gateway.answer_rate import AnswerRate, retry_after_s
from sie.cluster.gateway.fair_queue import EVERYBODY, Caller
from sie.cluster.gateway.placement import Placement
from sie.cluster.gateway.work_items import Item, Join, Place, RemotePending
from sie.cluster.payloads import VERSION, ItemOperation, Result, Taken, Work, encode
from sie.cluster.subjects import Lane, answer_subject, is_answer_of, work_subject
from sie.runtime.logs import get_logger
from sie.values.errors import (
    DeadlineExceeded,
    Internal,
    Overloaded,
    PoisonInput,
    ProtocolError,
    SieError,
    Unavailable,
)

_log = get_logger(__name__)
_MAX_LOSSES: Final = 3
_RETRY_S: Final = 0.5
_MAX_AT_ONCE: Final = 256
_ITEM_BYTES: Final = 256
_MOST_BYTES: Final = 32_768
"""An item's cost in its key's turns is its size in bytes; the cost of an image does not grow with its file."""
_CALM_S: Final = 5.0
_WAIT_SHARE: Final = 0.5
"""A request is refused if it would wait for more of its time than this: its answer must come in the rest."""


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
        self, connection: Connection, gateway: str, max_items: int, metrics: FlightMetrics | None = None,
        *, window: Callable[[Lane, str], int] = lambda _lane, _model: _MAX_AT_ONCE,
    ) -> None:  # fmt: skip
        """Window returns how many unanswered items of a lane and model this gateway may have published."""
        self._metrics = metrics
        self._window = window
        self._connection = connection
        self._gateway = gateway
        self._max_items = max_items
        self._items: dict[str, Item] = {}
        self._pending: dict[RemotePending, None] = {}  # in the order in which they came
        self._places: defaultdict[tuple[Lane, str], Place] = defaultdict(Place)
        self._by_caller: Counter[Caller] = Counter()
        self._calm_s = 0.0
        """The time from which answers show what hosts can do, and not what NATS could do while it was in trouble."""
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

    def check_room(self, caller: Caller = EVERYBODY, num_items: int = 1) -> None:
        """Raise Overloaded if so many items more would be over `max_in_flight`, unless another key holds more of it."""
        if self._is_full(num_items) and self._heaviest(caller, num_items) is None:
            text = f"The gateway holds max_in_flight ({self._max_items}) work items"
            raise self._overloaded(text)

    def _is_full(self, num_items: int) -> bool:
        return bool(self._items) and len(self._items) + num_items > self._max_items

    def _overloaded(self, text: str) -> Overloaded:
        return Overloaded(text, retry_after_s=self._retry_after_s(len(self._items), self._rates.values()))

    def _heaviest(self, caller: Caller, num_items: int) -> Caller | None:
        """Return the key that holds the most for its weight, if that is more than another would with its new items."""
        heaviest = max(self._by_caller, key=lambda known: self._by_caller[known] / known.weight)
        own = (self._by_caller[caller] + num_items) / caller.weight
        return heaviest if self._by_caller[heaviest] / heaviest.weight > own else None

    def _make_room(self, caller: Caller, num_items: int) -> None:
        """Refuse the newest requests of the keys that hold more than their share. Raises Overloaded."""
        while self._is_full(num_items):
            self.check_room(caller, num_items)
            heaviest = self._heaviest(caller, num_items)
            last = next(pending for pending in reversed(self._pending) if pending.caller == heaviest)
            text = f"The gateway holds max_in_flight ({self._max_items}) work items, most of them of this key"
            self.abandon(last, self._overloaded(text))
            self._forget(last)

    def _check_wait(self, place: Place, caller: Caller, deadline_ns: int) -> None:
        """Refuse a request that would wait for too much of its time. Raises Overloaded."""
        wait_s = place.wait_s(caller)
        if wait_s and wait_s > (deadline_ns - time.monotonic_ns()) / 1e9 * _WAIT_SHARE:
            text = f"This request would wait for {wait_s:.1f} s before its turn, too long for its deadline"
            raise Overloaded(text, retry_after_s=retry_after_s(math.ceil(wait_s), 1.0))

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
        join: Join, placement: Placement | None = None, caller: Caller = EVERYBODY,
    ) -> RemotePending:  # fmt: skip
        """Publish the items of a request when it is their turn; deadline_ns is local. Raises Overloaded."""
        self._check_wait(self._places[lane, model], caller, deadline_ns)
        self._make_room(caller, len(bodies))
        if self._metrics is not None:
            self._metrics.record_items(lane, model, len(bodies))
        number, reply_to = next(self._numbers), answer_subject(self._gateway, lane.pool, "result")
        deadline = self._connection.clock.to_server(deadline_ns)
        items: list[Item] = []
        for index, body in enumerate(bodies):
            name = f"{self._gateway}-{number}-{index}"
            work = Work(VERSION, name, reply_to, deadline, operation, model, memoryview(body))
            items.append(Item(work, lane, placement, index))
        pending = RemotePending(items, deadline_ns, join, caller)
        self._pending[pending] = None
        pending.future.add_done_callback(lambda _: self._forget(pending))
        for item in items:
            item.pending = pending
            self._items[item.work.id] = item
            self.by_lane[lane] += 1
            self._by_caller[caller] += 1
            self._wait(item)
        self._pump(lane, model)
        return pending

    # --- the backlog ----------------------------------------------------------------------------------------------

    def take_backlog(self) -> dict[str, int]:
        """Return, by subject of work, the most weight of keys whose items have waited here at a time since the last call."""
        found = {work_subject(*where): place.weight for where, place in self._places.items() if place.weight}
        for place in self._places.values():
            place.weight = place.queue.weight()
        return found

    def pump(self) -> None:
        """Publish what has room now, and forget places without work."""
        for (lane, model), place in list(self._places.items()):
            self._pump(lane, model)
            if not self.by_lane[lane] and not len(place.queue) and not place.num_published:
                del self._places[lane, model]

    def _wait(self, item: Item) -> None:
        place = self._places[item.lane, item.work.model]
        place.queue.add(item.pending.caller, item, min(_ITEM_BYTES + len(item.work.body), _MOST_BYTES))

    def _pump(self, lane: Lane, model: str) -> None:
        place = self._places[lane, model]
        place.look(is_open=self._connection.is_connected and time.monotonic() >= self._calm_s)
        if not self._connection.is_connected:
            return  # `publish_again` follows
        room = self._window(lane, model) - place.num_published if len(place.queue) else 0
        for _ in range(min(room, len(place.queue))):
            item = place.queue.pop()
            item.is_published = True
            place.num_published += 1
            self._spawn(self._publish(item))
        place.weight = max(place.weight, place.queue.weight())
        place.look(is_open=time.monotonic() >= self._calm_s)

    def _leave(self, item: Item) -> None:
        """Take an item out of its place, wherever it is there."""
        place = self._places[item.lane, item.work.model]
        if item.is_published:
            item.is_published = False
            place.num_published -= 1
        else:
            place.queue.discard(item.pending.caller, item)

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- publishing -----------------------------------------------------------------------------------------------

    async def _publish(self, item: Item) -> None:
        """Publish an item, and try again while NATS cannot take it. A full stream or store ends its request.

        The tries are one message for NATS, which may have stored it and lost only its confirmation.
        """
        item.num_published += 1
        while item.work.id in self._items:
            try:
                await self._publish_once(item)
                return
            except Unavailable:
                self._calm_s = time.monotonic() + _CALM_S
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
        message_id = f"{work.id}.{item.num_published}"
        began_s = time.monotonic()
        item.sequence = await self._connection.enqueue(
            pool, work_subject(item.lane, work.model), encode(work), message_id
        )
        if self._metrics is not None:
            self._metrics.record_published(work.operation, time.monotonic() - began_s)

    async def publish_again(self) -> None:
        """Publish every published item again, since a reconnect may have lost it or its result; then what has room."""
        self._calm_s = time.monotonic() + _CALM_S
        items = [item for item in self._items.values() if item.is_published]
        for start in range(0, len(items), _MAX_AT_ONCE):
            batch = items[start : start + _MAX_AT_ONCE]
            for item in batch:
                item.stored = ""  # a restarted server may have lost the payload, too
            await asyncio.gather(*map(self._publish, batch))
        self.pump()

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
            self._leave(item)
            if item.sequence:
                self._spawn(self._connection.remove(item.lane.pool, item.sequence))
            item.lane, item.stored, item.sequence = lane, "", 0
            self.by_lane[lane] += 1
            self._wait(item)
        self.pump()

    # --- results --------------------------------------------------------------------------------------------------

    async def on_result(self, result: Result, subject: str) -> None:
        """Take in a result; of several for one item the first counts. subject is the one that it came on."""
        item = self._items.get(result.id)
        if item is None:
            self.num_duplicates += 1
            return
        if not is_answer_of(subject, item.lane.pool):
            _log.warning("a result from another pool is refused: %s", subject)
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
        place = self._places[item.lane, item.work.model]
        place.answered()
        if self._drop(item) is None:
            return
        self._pump(item.lane, item.work.model)
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
            self._leave(item)
            self._by_caller[item.pending.caller] -= 1
            if not self._by_caller[item.pending.caller]:
                del self._by_caller[item.pending.caller]
            if item.stored:
                self._spawn(self._connection.forget(item.lane.pool, item.stored))
        return known

    def on_taken(self, taken: Taken, subject: str) -> None:
        """Note which host runs items."""
        for name in taken.ids:
            item = self._items.get(name)
            if item is not None and is_answer_of(subject, item.lane.pool):
                item.taken_by = taken.host
                item.lost_with.discard(taken.host)

    # --- ends -----------------------------------------------------------------------------------------------------

    def abandon(self, pending: RemotePending, error: SieError) -> None:
        """End a request with an error. Its items that no host has taken leave the stream."""
        if not pending.future.done():
            pending.future.set_exception(error)
            pending.future.exception()  # a caller may have gone; asyncio would report it as never retrieved

    def _forget(self, pending: RemotePending) -> None:
        self._pending.pop(pending, None)
        for item in pending.items:
            if self._drop(item) is not None and item.sequence and not item.taken_by and self._connection.is_connected:
                self._spawn(self._connection.remove(item.lane.pool, item.sequence))
        for lane in {item.lane for item in pending.items}:
            self._pump(lane, pending.items[0].work.model)

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
        self.abandon(item.pending, PoisonInput(text))
        if self._metrics is not None:
            self._metrics.record_dead(item.lane, item.work.model)
        await self._connection.remove(item.lane.pool, item.sequence)
        await bury(self._connection, item.lane, item.work, text, sorted(item.lost_with))

    def fail_all(self, error: SieError) -> None:
        """End every request, when the process ends."""
        for pending in list(self._pending):
            self.abandon(pending, error)
