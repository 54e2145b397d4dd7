"""Keeps every work item of this gateway until it is answered or its deadline has passed, and publishes it again if lost.

The first result of an item counts; later ones, of copies and of redelivered items, are dropped. A request is answered
when all its items are, or with the error of its first item that failed, as a host itself would answer.

NATS gets about as many items as the hosts have room for; the others wait here, where API keys take turns. Short items
that leave in one turn of the event loop are one message (`sie.cluster.gateway.parcels`): a message costs more than its items.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sie.cluster.connection import Connection
from sie.cluster.dead_letters import bury
from sie.cluster.gateway.answer_rate import retry_after_s
from sie.cluster.gateway.fair_queue import EVERYBODY, Caller
from sie.cluster.gateway.parcels import Parcels, PublishMetrics
from sie.cluster.gateway.requested_placement import Placement
from sie.cluster.gateway.room import Room
from sie.cluster.gateway.work_items import Item, Join, Parcel, Place, RemotePending
from sie.cluster.payloads import VERSION, ItemOperation, Result, Taken, Work
from sie.cluster.request_forms import Piece
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
_RETURN_S: Final = 0.2
"""An item that a host gave back waits this long before it is queued again."""
_ITEM_BYTES: Final = 256
_MOST_BYTES: Final = 32_768
"""An item's cost in its key's turns is its size in bytes; the cost of an image does not grow with its file."""
_CALM_S: Final = 5.0
_WAIT_SHARE: Final = 0.5
"""A request is refused if it would wait for more of its time than this: its answer must come in the rest."""


class FlightMetrics(PublishMetrics, Protocol):
    """The metrics of the requests in flight; durations in seconds."""

    record_wait: Callable[[float], None]

    def record_items(self, lane: Lane, model: str, num_items: int) -> None:
        """Count a request by the number of its items."""
        ...

    def record_dead(self, lane: Lane, model: str) -> None:
        """Count an item that is not tried again."""
        ...


class InFlight:
    """The unanswered work items of one gateway process."""

    def __init__(
        self, connection: Connection, gateway: str, max_items: int, metrics: FlightMetrics | None = None,
        *, window: Callable[[Lane, str], int] = lambda _lane, _model: _MAX_AT_ONCE,
        together: Callable[[Lane, str], int] = lambda _lane, _model: 1,
    ) -> None:  # fmt: skip
        """Hold at most max_items.

        For a lane and a model, `window` returns how many items may be published and unanswered. `together` returns how
        many may be in one message.
        """
        self._metrics = metrics
        self._window = window
        self._connection = connection
        self._gateway = gateway
        self._room = Room(max_items)
        self._items: dict[str, Item] = {}
        self._pending: dict[RemotePending, None] = {}  # in the order in which they came
        self._places: defaultdict[tuple[Lane, str], Place] = defaultdict(Place)
        self._calm_s = 0.0
        """The time from which answers show what hosts can do, and not what NATS could do while it was in trouble."""
        self._numbers = itertools.count(1)
        self._parcels = Parcels(connection, gateway, metrics, together)
        self._due: dict[tuple[Lane, str], None] = {}
        """The places to publish from at the end of this turn of the event loop."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.by_lane: Counter[Lane] = Counter()

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
        self._room.check(caller, num_items)

    def _make_room(self, caller: Caller, num_items: int) -> None:
        """Refuse the newest requests of the keys that hold more than their share. Raises Overloaded."""
        while (heaviest := self._room.check(caller, num_items)) is not None:
            last = next(pending for pending in reversed(self._pending) if pending.caller == heaviest)
            self.abandon(last, self._room.overloaded(", most of them of this key"))
            self._forget(last)

    def _check_wait(self, place: Place, caller: Caller, deadline_ns: int) -> None:
        """Refuse a request that would wait for too much of its time. Raises Overloaded."""
        wait_s = place.wait_s(caller)
        if wait_s and wait_s > (deadline_ns - time.monotonic_ns()) / 1e9 * _WAIT_SHARE:
            text = f"This request would wait for {wait_s:.1f} s before its turn, too long for its deadline"
            raise Overloaded(text, retry_after_s=retry_after_s(math.ceil(wait_s), 1.0))

    def submit(
        self, lane: Lane, operation: ItemOperation, model: str, pieces: Sequence[Piece], *, deadline_ns: int,
        join: Join, placement: Placement | None = None, caller: Caller = EVERYBODY,
    ) -> RemotePending:  # fmt: skip
        """Publish the items of a request when it is their turn; deadline_ns is local. Raises Overloaded."""
        self._check_wait(self._places[lane, model], caller, deadline_ns)
        self._make_room(caller, len(pieces))
        if self._metrics is not None:
            self._metrics.record_items(lane, model, len(pieces))
        number, reply_to = next(self._numbers), answer_subject(self._gateway, lane.pool, "result")
        deadline = self._connection.clock.to_server(deadline_ns)
        items: list[Item] = []
        for index, piece in enumerate(pieces):
            name = f"{self._gateway}-{number}-{index}"
            work = Work(VERSION, name, reply_to, deadline, operation, model, memoryview(piece.body))
            items.append(Item(work, lane, placement, index, piece.first))
        pending = RemotePending(items, deadline_ns, join, caller)
        self._pending[pending] = None
        pending.future.add_done_callback(lambda _: self._forget(pending))
        self._room.take(caller, len(items))
        for item in items:
            item.pending = pending
            self._items[item.work.id] = item
            self.by_lane[lane] += 1
            self._wait(item)
        self._pump_soon(lane, model)
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

    def _pump_soon(self, lane: Lane, model: str) -> None:
        """Publish from a place at the end of this turn of the event loop, so that items of one turn share a message."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._pump_due)
        self._due[lane, model] = None

    def _pump_due(self) -> None:
        due, self._due = self._due, {}
        for lane, model in due:
            self._pump(lane, model)

    def _pump(self, lane: Lane, model: str) -> None:
        place = self._places[lane, model]
        place.look(is_open=self._connection.is_connected and time.monotonic() >= self._calm_s)
        if not self._connection.is_connected:
            return  # `publish_again` follows
        room = self._window(lane, model) - place.num_published if len(place.queue) else 0
        leaving = [place.queue.pop() for _ in range(min(room, len(place.queue)))]
        place.num_published += len(leaving)
        for parcel in self._parcels.pack(leaving):
            self._spawn(self._publish(parcel))
        place.weight = max(place.weight, place.queue.weight())
        place.look(is_open=time.monotonic() >= self._calm_s)

    def _leave(self, item: Item) -> Parcel | None:
        """Take an item out of its place: out of the queue, or out of its parcel. Return the parcel if it is empty now."""
        place, parcel = self._places[item.lane, item.work.model], item.parcel
        if parcel is None:
            place.queue.discard(item.pending.caller, item)
            return None
        item.parcel = None
        place.num_published -= 1
        del parcel.items[item]
        if place.leave_suspects(item) and (following := place.suspect()) is not None and following.parcel is not None:
            self._spawn(self._publish(following.parcel))
        return parcel if not parcel.items else None

    def _remove(self, lane: Lane, parcel: Parcel) -> None:
        """Remove a message that nobody waits for from the stream, if NATS has confirmed it and is connected."""
        if parcel.sequence and self._connection.is_connected:
            self._spawn(self._connection.remove(lane.pool, parcel.sequence))

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- publishing -----------------------------------------------------------------------------------------------

    async def _publish(self, parcel: Parcel) -> None:
        """Publish a parcel, and try again while NATS cannot take it. A full stream or store ends its requests.

        The tries are one message for NATS, which may have stored it and lost only its confirmation.
        """
        lane = next((item.lane for item in parcel.items), None)
        while parcel.items and lane is not None:
            try:
                await self._parcels.publish(parcel)
                if not parcel.items and not parcel.is_taken:  # its requests ended before it had a number
                    self._remove(lane, parcel)
                return
            except Unavailable:
                self._calm_s = time.monotonic() + _CALM_S
                if not self._connection.is_connected:
                    return  # `publish_again` follows
                await asyncio.sleep(_RETRY_S)
            except SieError as error:
                for item in list(parcel.items):
                    pool = item.lane.pool
                    num_waiting = sum(count for lane, count in self.by_lane.items() if lane.pool == pool)
                    self.abandon(item.pending, self._room.with_retry_after(error, pool, num_waiting))
                return
            except Exception:
                _log.exception("work items cannot be published")
                for item in list(parcel.items):
                    self.abandon(item.pending, Internal("internal error"))
                return

    def _is_held(self, item: Item) -> bool:
        """Return whether an item must not be published yet: another item that was lost with it comes first."""
        place = self._places[item.lane, item.work.model]
        return item in place.suspects and item is not place.suspect()

    async def publish_again(self) -> None:
        """Publish every published item again, since a reconnect may have lost it or its result; then what has room."""
        self._calm_s = time.monotonic() + _CALM_S
        parcels = dict.fromkeys(
            item.parcel for item in self._items.values() if item.parcel is not None and not self._is_held(item)
        )
        again = [fresh for parcel in parcels for fresh in self._parcels.pack(list(parcel.items))]
        for start in range(0, len(again), _MAX_AT_ONCE):
            batch = again[start : start + _MAX_AT_ONCE]
            for item in (item for parcel in batch for item in parcel.items):
                item.stored = ""  # a restarted server may have lost the payload, too
            await asyncio.gather(*map(self._publish, batch))
        self.pump()

    def waiting(self, is_served: Callable[[Lane, str], bool]) -> dict[tuple[Lane, str, Placement], list[Item]]:
        """Return the unanswered items whose lane does not serve their model, by lane, model and wanted placement."""
        unserved = {where for where in self._places if not is_served(*where)}
        found: defaultdict[tuple[Lane, str, Placement], list[Item]] = defaultdict(list)
        for item in self._items.values() if unserved else ():
            if (item.lane, item.work.model) in unserved:
                found[item.lane, item.work.model, item.placement].append(item)
        return dict(found)

    def move(self, items: Sequence[Item], lane: Lane) -> None:
        """Publish items in another lane, because theirs has no host left."""
        for item in items:
            self.by_lane[item.lane] -= 1
            if (parcel := self._leave(item)) is not None:
                self._remove(item.lane, parcel)
            item.lane, item.stored = lane, ""
            self.by_lane[lane] += 1
            self._wait(item)
        self.pump()

    # --- results --------------------------------------------------------------------------------------------------

    def on_result(self, result: Result, subject: str) -> None:
        """Take in a result; of several for one item the first counts. subject is the one that it came on."""
        item = self._items.get(result.id)
        if item is None:
            self._forget_late(result, subject)
            return
        if not is_answer_of(subject, item.lane.pool):
            _log.warning("a result from another pool is refused: %s", subject)
            return
        if item.parcel is not None:
            item.parcel.is_taken = True
        if result.is_returned:
            asyncio.get_running_loop().call_later(_RETURN_S, self._take_back, item, item.parcel)
            return
        if result.stored:
            self._spawn(self._fetch(item, result))
            return
        self._answer(item, result)

    def _forget_late(self, result: Result, subject: str) -> None:
        """Delete the reply of a result that nobody waits for: it would fill the store until its age ends it."""
        if result.stored:
            for pool in {lane.pool for lane in self.by_lane if is_answer_of(subject, lane.pool)}:
                self._spawn(self._connection.forget(pool, result.stored))

    def _take_back(self, item: Item, parcel: Parcel | None) -> None:
        """Queue an item again that a host gave back with this parcel, unless it has ended or moved since."""
        if parcel is not None and item.parcel is parcel:
            item.taken_by = ""
            self._leave(item)
            self._wait(item)
            self._pump_soon(item.lane, item.work.model)

    async def _fetch(self, item: Item, result: Result) -> None:
        try:
            reply = await self._connection.fetch(item.lane.pool, result.stored)
        except SieError as error:
            _log.warning("the result of %s is lost: %s; publishing it again", item.work.id, error.message)
            self._take_back(item, item.parcel)
            return
        await self._connection.forget(item.lane.pool, result.stored)
        self._answer(item, Result(
            VERSION, result.id, result.host, None, memoryview(reply), "", result.num_tokens, result.image_tokens,
            result.tokenization_ns, result.queue_ns, result.cuts,
        ))  # fmt: skip

    def _answer(self, item: Item, result: Result) -> None:
        place = self._places[item.lane, item.work.model]
        place.answered()
        if not self._drop(item):
            return
        self._pump_soon(item.lane, item.work.model)
        self._room.count_answer(item.lane.pool)
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
        except Exception:  # the results after it in its message are other requests'
            _log.exception("the results of a request cannot be joined")
            pending.future.set_exception(Internal("internal error"))

    def _drop(self, item: Item) -> bool:
        """Forget an item, delete its payload, and a message that no host has taken. Return False if it was forgotten before."""
        if self._items.pop(item.work.id, None) is None:
            return False
        self.by_lane[item.lane] -= 1
        parcel = self._leave(item)
        if parcel is not None and not parcel.is_taken:
            self._remove(item.lane, parcel)
        self._room.give_back(item.pending.caller)
        if item.stored:
            self._spawn(self._connection.forget(item.lane.pool, item.stored))
        return True

    def on_taken(self, taken: Taken, subject: str) -> None:
        """Note which host runs items."""
        for name in taken.ids:
            item = self._items.get(name)
            if item is not None and is_answer_of(subject, item.lane.pool):
                item.taken_by = taken.host
                item.lost_with.discard(taken.host)
                if item.parcel is not None:
                    item.parcel.is_taken = True

    # --- ends -----------------------------------------------------------------------------------------------------

    def abandon(self, pending: RemotePending, error: SieError) -> None:
        """End a request with an error. Its items that no host has taken leave the stream."""
        if not pending.future.done():
            pending.future.set_exception(error)
            pending.future.exception()  # a caller may have gone; asyncio would report it as never retrieved

    def _forget(self, pending: RemotePending) -> None:
        self._pending.pop(pending, None)
        # Each item refers to its request. The cycle would stay until the garbage collector runs.
        items, pending.items = pending.items, []
        for item in items:
            if self._drop(item):
                self._pump_soon(item.lane, item.work.model)

    def expire(self, now_ns: int, reason: SieError | None = None) -> None:
        """End the requests whose deadline has passed, with the reason if it is known."""
        for pending in [pending for pending in self._pending if pending.deadline_ns <= now_ns]:
            late = DeadlineExceeded("the request's deadline passed before its answer was there")
            self.abandon(pending, reason or late)

    def on_silent(self, silent: set[str]) -> None:
        """Count the losses of items whose hosts fell silent; an item that was lost with three hosts is not tried again.

        The stream delivers such an item to another host by itself, since nobody acknowledges it. Those of a parcel are
        published anew before the last try, one after another: what one of them does to hosts must not convict the others.
        """
        lost: dict[Parcel, None] = {}
        for item in list(self._items.values()) if silent else ():
            if item.taken_by in silent and item.taken_by not in item.lost_with:
                item.lost_with.add(item.taken_by)
                if len(item.lost_with) >= _MAX_LOSSES:
                    self._spawn(self._bury(item))
                elif item.parcel is not None and len(item.lost_with) == _MAX_LOSSES - 1 and len(item.parcel.items) > 1:
                    lost[item.parcel] = None
        for parcel in lost:
            self._part(parcel)

    def _part(self, parcel: Parcel) -> None:
        """Take a parcel back, and publish its items one after another, each when the one before it has ended."""
        items = list(parcel.items)
        self._remove(items[0].lane, parcel)
        place = self._places[items[0].lane, items[0].work.model]
        is_first = place.suspect() is None
        for item in items:
            item.taken_by = ""
            self._parcels.parcel([item])
            place.suspects[item] = None
        if is_first and items[0].parcel is not None:
            self._spawn(self._publish(items[0].parcel))

    def on_returned(self, host: str) -> None:
        """Take back the losses of a host that beats again: it was only unreachable."""
        for item in self._items.values():
            item.lost_with.discard(host)

    async def _bury(self, item: Item) -> None:
        text = f"This input was running on {_MAX_LOSSES} hosts when they were lost; it is not tried again"
        if item.parcel is not None and len(item.parcel.items) == 1:
            self._remove(item.lane, item.parcel)
        self.abandon(item.pending, PoisonInput(text))
        if self._metrics is not None:
            self._metrics.record_dead(item.lane, item.work.model)
        await bury(self._connection, item.lane, item.work, text, sorted(item.lost_with))

    def fail_all(self, error: SieError) -> None:
        """End every request, when the process ends."""
        for pending in list(self._pending):
            self.abandon(pending, error)
