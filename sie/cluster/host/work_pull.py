"""Takes work items from NATS as the engine has room, runs them, publishes their results, and acknowledges them.

A message may have several items; it is acknowledged when all of them are answered (`sie.cluster.host.outbox`). An item
may run twice; its gateway takes the first result. An item that this host cannot run goes back to its gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Coroutine
from functools import partial
from typing import Any, Final

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from sie.cluster.connection import INLINE_BYTES, Connection, reason_of
from sie.cluster.dead_letters import bury
from sie.cluster.host.consumer import Consumer
from sie.cluster.host.credit import Credit
from sie.cluster.host.item_run import Answer, read_answer, run_item, try_start
from sie.cluster.host.outbox import Outbox
from sie.cluster.host.pull_metrics import PullMetrics
from sie.cluster.payloads import VERSION, Result, Taken, Work, decode, encode, works_decoder
from sie.cluster.request_forms import Request, read_item
from sie.cluster.subjects import Lane, token
from sie.frontend.engine.interface import Reply
from sie.frontend.operations.interface import TimedSubmission
from sie.frontend.process import FrontendProcess
from sie.runtime import failpoints
from sie.runtime.logs import get_logger
from sie.values.errors import (
    Internal,
    Overloaded,
    PoisonInput,
    ProtocolError,
    SieError,
    Unavailable,
    WorkerLost,
    to_wire,
)

_log = get_logger(__name__)
_RENEW_S: Final = 0.8
"""How often the server hears that an item is still running, well within its wait for an acknowledgement."""
_KEEP_AGAIN_S: Final = 0.2
_MAKE_AGAIN_S: Final = 1.0
_DRAIN_STEP_S: Final = 0.05
_ELSEWHERE: Final = frozenset(("MODEL_LOADING", "MODEL_NOT_LOADED", "SHUTTING_DOWN", "UPSTREAM_UNAVAILABLE"))
"""Errors of this host and not of the item: another host may serve it, or this one a little later."""
_CPU_STEP_TOKENS: Final = 1024
_GPU_STEP_TOKENS: Final = 16_384


class Delivery:
    """One message with work items, until all of them are answered."""

    __slots__ = ("num_left", "renewed_s", "reply")

    def __init__(self, reply: str, num_items: int) -> None:
        """Take the subject that acknowledges the message as `reply`."""
        self.reply = reply
        self.num_left = num_items
        self.renewed_s = time.monotonic()


class Running:
    """One item that was taken, with the messages that brought it."""

    __slots__ = ("deliveries", "is_told", "task", "work")

    def __init__(self, work: Work, delivery: Delivery) -> None:
        self.work = work
        self.deliveries = [delivery]
        self.is_told = False
        self.task: asyncio.Task[None] | None = None
        """The task that runs it; None while it waits for a worker alone."""


class WorkPull:
    """The work items of one host."""

    def __init__(
        self, process: FrontendProcess, connection: Connection, lane: Lane, host: str, metrics: PullMetrics
    ) -> None:
        self._process = process
        self._connection = connection
        self._lane = lane
        self._host = host
        self._consumers: dict[str, Consumer] = {}
        self._again_s: dict[str, float] = {}
        """By model whose consumer could not be made, the time at which that is tried again."""
        self._credit = Credit(process.settings.cluster.max_pulled)
        self._running: dict[str, Running] = {}
        self._outbox = Outbox(connection, self._on_sent)
        self._metrics = metrics
        self._num_done = 0
        self._rate_s = time.monotonic()
        self.items_per_s = 0.0
        self.is_stopping = False

    @property
    def num_running(self) -> int:
        """Items that were taken and are not answered."""
        return len(self._running)

    @property
    def credit(self) -> int:
        """Items that this host would have at a time now: those that run, and those it has room for."""
        return len(self._running) + self._room()

    async def move(self, lane: Lane) -> None:
        """Take the work of another lane from now on. Items taken before are answered as usual."""
        consumers, self._consumers = self._consumers, {}
        self._lane = lane
        for consumer in consumers.values():
            await self._close(consumer)

    async def _close(self, consumer: Consumer) -> None:
        try:
            await consumer.close()
        except nats.errors.Error as error:  # without a connection there are no open requests either
            _log.debug("a consumer was not closed: %s", error)

    # --- taking ---------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Follow the models that are loaded, renew what runs, and ask for more."""
        began_s = time.monotonic()
        await self._follow_models()
        await self._renew()
        await self._pull()
        num_asked = sum(consumer.num_asked for consumer in self._consumers.values())
        self._metrics.show_turn(time.monotonic() - began_s, self._room(), num_asked, len(self._running))

    async def restore(self) -> None:
        """Make the consumers again after a reconnect. Raises nats' errors."""
        for consumer in list(self._consumers.values()):
            await consumer.restore()
        await self._pull()

    async def _follow_models(self) -> None:
        """Keep a consumer for each model that is served here. NATS deletes a consumer that nobody uses for long."""
        served = self._served()
        for model in self._consumers.keys() - served:
            await self._close(self._consumers.pop(model))
        now_s = time.monotonic()
        for model in served:
            if now_s < self._again_s.get(model, 0.0):
                continue
            try:
                await self._make_sure(model)
                self._again_s.pop(model, None)
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                self._again_s[model] = now_s + _MAKE_AGAIN_S
                _log.warning("no work is pulled for %s yet: %s", model, reason_of(error))
                if isinstance(error, TimeoutError):
                    return  # the others would wait as long: what runs must be renewed first

    async def _make_sure(self, model: str) -> None:
        """Make sure of a model's consumer. Raises nats' errors."""
        known = self._consumers.get(model)
        if known is None:
            prefix, lease = self._process.settings.cluster.nats_inbox_prefix, token(self._lane.lease)
            inbox = f"{prefix}.sie.{self._host}.{token(model)}.{lease}"
            consumer = Consumer(self._connection, self._lane, model, inbox, self._take)
            await consumer.open()
            self._consumers[model] = consumer
        elif known.is_lost:
            await known.restore()

    def _served(self) -> set[str]:
        """Return the models whose work this host takes: those that are loaded here, except models of tensors."""
        if self.is_stopping:
            return set()
        entries = self._process.models.entries
        return {
            model for model, entry in entries.items()
            if entry.state == "loaded" and entry.workers and entry.card.kind != "tensor"
        }  # fmt: skip

    async def _pull(self) -> None:
        if not self._connection.is_connected:
            return
        entries = self._process.models.entries
        served = self._served()
        for model, consumer in list(self._consumers.items()):  # one that is closed meanwhile asks for nothing
            if model in served and (room := self._room(entries[model].workers)) > 0:
                await consumer.pull(room)

    def _room(self, slots: Collection[int] | None = None) -> int:
        """Return how many items the workers in slots have room for: those of a model. None: all."""
        process = self._process
        ready = [worker for worker in process.models.workers if worker.state == "ready"]
        workers = [worker for worker in ready if slots is None or worker.slot in slots]
        is_gpu = any(worker.device.startswith("cuda") for worker in workers)
        step = process.settings.scheduler.max_step_tokens or (_GPU_STEP_TOKENS if is_gpu else _CPU_STEP_TOKENS)
        try:
            process.check_accepting()
        except SieError:
            return 0
        queued = process.engine.queued_on([worker.slot for worker in workers])
        return self._credit.room(queued, step, len(workers))

    async def _take(self, message: Msg) -> int:
        """Begin the items of a message. Return how many it has."""
        try:
            works = decode(message.data, works_decoder).items
        except ProtocolError as error:
            _log.error("work items are refused: %s", error)
            await self._connection.publish(message.reply, b"+TERM")
            return 1
        if self.is_stopping:
            await self._give_back(message.reply)
        else:
            delivery = Delivery(message.reply, len(works))
            for work in works:
                self._begin(work, delivery)
        return len(works)

    def _begin(self, work: Work, delivery: Delivery) -> None:
        running = self._running.get(work.id)
        if running is not None:  # delivered again while it runs
            running.deliveries.append(delivery)
        elif self._connection.clock.left_ns(work.deadline_ns) <= 0:
            self._metrics.record_item(work.model, "expired")
            # Its gateway knows better whether it still waits: the clock by which deadlines cross hosts may have been set.
            self._outbox.add(work.reply_to, Result(VERSION, work.id, self._host, is_returned=True))
            self._settle(delivery)
        else:
            self._credit.begin()
            running = self._running[work.id] = Running(work, delivery)
            self._start(running)

    def _settle(self, delivery: Delivery) -> None:
        """Count an item of a message that needs no more, and acknowledge the message after the last one."""
        delivery.num_left -= 1
        if not delivery.num_left:
            self._outbox.acknowledge(delivery.reply)

    async def _give_back(self, reply: str) -> None:
        """Have the server deliver a message again, to any host."""
        await self._connection.publish(reply, b"-NAK")

    # --- running --------------------------------------------------------------------------------------------------

    def _start(self, running: Running) -> None:
        """Run an item: in callbacks if it waits for a worker alone, as most do, or else in a task."""
        work = running.work
        failpoints.reach("cluster.taken")
        try:
            request = read_item(work.operation, work.model, work.body) if not work.stored else None
            started = try_start(self._process, work.model, request, self._deadline_ns(work)) if request else None
        except Exception as error:
            self._spawn(running, self._fail(running, error))
            return
        if request is None or started is None:
            self._spawn(running, self._run(running, request))
        else:
            started.pending.future.add_done_callback(partial(self._on_reply, running, request, started))

    def _spawn(self, running: Running, work: Coroutine[Any, Any, None]) -> None:
        running.task = asyncio.get_running_loop().create_task(work)

    def _deadline_ns(self, work: Work) -> int:
        return self._connection.clock.to_local(work.deadline_ns)

    def _on_reply(
        self, running: Running, request: Request, started: TimedSubmission, future: asyncio.Future[Reply]
    ) -> None:
        try:
            answer = read_answer(request, started, future.result())
        except Exception as error:
            self._spawn(running, self._fail(running, error))
            return
        if len(answer.reply) > INLINE_BYTES:
            self._spawn(running, self._keep(running, answer))
        else:
            self._end(running, _result(running.work, self._host, answer), answer.num_tokens)

    async def _run(self, running: Running, request: Request | None) -> None:
        work = running.work
        try:
            if request is None:
                body = await self._connection.fetch(self._lane.pool, work.stored)
                request = read_item(work.operation, work.model, body)
            answer = await run_item(self._process, work.model, request, self._deadline_ns(work))
        except Exception as error:
            await self._fail(running, error)
        else:
            await self._keep(running, answer)

    async def _keep(self, running: Running, answer: Answer) -> None:
        """Answer an item, with a large reply by reference. While the store takes no more the reply waits here: to run again costs more."""
        work, stored = running.work, ""
        while len(answer.reply) > INLINE_BYTES and not stored:
            try:
                stored = await self._connection.keep(self._lane.pool, f"{work.id}.{self._host}", answer.reply)
            except Exception as error:
                if not isinstance(error, SieError) or self._connection.clock.left_ns(work.deadline_ns) <= 0:
                    await self._fail(running, error)
                    return
                await asyncio.sleep(_KEEP_AGAIN_S)
        self._end(running, _result(work, self._host, answer, stored), answer.num_tokens)

    async def _fail(self, running: Running, error: Exception) -> None:
        """End an item with an error: give it back if another host may serve it. A poisonous input becomes a dead letter."""
        work = running.work
        if not isinstance(error, SieError):
            _log.error("work item %s failed", work.id, exc_info=error)
            is_refused = isinstance(error, ProtocolError)
            error = Internal(f"the host refused it: {error}" if is_refused else "internal error")
        if isinstance(error, PoisonInput):
            # ORDER: before the result, after which the gateway deletes a body in the object store
            await bury(self._connection, self._lane, work, error.message, [self._host])
        is_ours = isinstance(error, Overloaded | WorkerLost) or error.code in _ELSEWHERE
        is_returned = is_ours and self._connection.clock.left_ns(work.deadline_ns) > 0
        self._end(running, Result(VERSION, work.id, self._host, error=to_wire(error), is_returned=is_returned))

    def _end(self, running: Running, result: Result, num_tokens: int = 0) -> None:
        """Publish an item's result soon. A delivered message is acknowledged when none of its items is left."""
        work = running.work
        outcome = "returned" if result.is_returned else "answered" if result.error is None else "failed"
        self._metrics.record_item(work.model, outcome)
        self._outbox.add(work.reply_to, result)
        for delivery in running.deliveries:
            self._settle(delivery)
        del self._running[work.id]
        self._credit.end(num_tokens)
        self._num_done += 1

    async def _on_sent(self) -> None:
        with contextlib.suppress(Unavailable):
            await self._pull()

    # --- while it runs --------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Say which items are still running: to the server, and once to their gateways."""
        now_s = time.monotonic()
        told: defaultdict[str, list[str]] = defaultdict(list)
        for running in list(self._running.values()):
            if not running.is_told:
                running.is_told = True
                told[running.work.reply_to].append(running.work.id)
            for delivery in running.deliveries:
                if now_s - delivery.renewed_s >= _RENEW_S:
                    delivery.renewed_s = now_s
                    await self._connection.publish(delivery.reply, b"+WPI")
        for reply_to, ids in told.items():
            subject = reply_to.rpartition(".")[0] + ".taken"
            await self._connection.publish(subject, encode(Taken(VERSION, self._host, ids)))
        if now_s - self._rate_s >= 1.0:
            self.items_per_s = self._num_done / (now_s - self._rate_s)
            self._num_done, self._rate_s = 0, now_s

    async def drain(self, deadline_s: float) -> None:
        """Take nothing more, and wait until all that was taken is answered, at most until deadline_s."""
        self.is_stopping = True
        while self._running and time.monotonic() < deadline_s:
            await asyncio.sleep(min(_DRAIN_STEP_S, max(0.0, deadline_s - time.monotonic())))
            await self._renew()
        await self._outbox.flush()
        for running in list(self._running.values()):
            if running.task is not None:
                running.task.cancel()
            for delivery in running.deliveries:
                await self._give_back(delivery.reply)


def _result(work: Work, host: str, answer: Answer, stored: str = "") -> Result:
    """Return an answer as a result; a large reply lies in the store."""
    return Result(
        VERSION, work.id, host, reply=answer.reply if not stored else memoryview(b""), stored=stored,
        num_tokens=answer.num_tokens, image_tokens=answer.image_tokens, tokenization_ns=answer.tokenization_ns,
        queue_ns=answer.queue_ns, cuts=answer.cuts,
    )  # fmt: skip
