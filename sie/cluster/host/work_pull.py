"""Takes work items from NATS as the engine has room, runs them, publishes their results, and acknowledges them.

ORDER: an item is acknowledged only after its result was published on the same connection, so a host that dies at any
point leaves either the result or the item. An item may run twice; its gateway takes the first result.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Collection
from typing import Final

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.dead_letters import bury
from sie.cluster.host.consumer import Consumer
from sie.cluster.host.credit import Credit
from sie.cluster.host.item_run import Answer, run_item
from sie.cluster.host.pull_metrics import PullMetrics
from sie.cluster.payloads import VERSION, Result, Taken, Work, decode, encode, work_decoder
from sie.cluster.request_forms import read_item
from sie.cluster.subjects import Lane, token
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
_RETURN_S: Final = 0.2
_ELSEWHERE: Final = frozenset(("MODEL_LOADING", "MODEL_NOT_LOADED", "SHUTTING_DOWN", "UPSTREAM_UNAVAILABLE"))
"""Errors of this host and not of the item: another host may serve it, or this one a little later."""
_CPU_STEP_TOKENS: Final = 1024
_GPU_STEP_TOKENS: Final = 16_384


class Running:
    """One item that was taken."""

    __slots__ = ("began_s", "is_told", "message", "task", "work")

    def __init__(self, work: Work, message: Msg) -> None:
        self.work = work
        self.message = message
        self.began_s = time.monotonic()
        self.is_told = False
        self.task: asyncio.Task[None] | None = None


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
        self._credit = Credit(process.settings.cluster.max_pulled)
        self._running: dict[str, Running] = {}
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
        """Take the work of another lane from now on. What was taken is answered as before."""
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
        """Have a consumer for each model that is served here. The server deletes those that nobody uses for long."""
        served = self._served()
        for model in self._consumers.keys() - served:
            await self._close(self._consumers.pop(model))
        for model in served:
            try:
                await self._make_sure(model)
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError) as error:
                _log.warning("no work is pulled for %s yet: %s", model, error or type(error).__name__)

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

    async def _take(self, message: Msg) -> None:
        try:
            work = decode(message.data, work_decoder)
        except ProtocolError as error:
            _log.error("a work item is refused: %s", error)
            await self._connection.publish(message.reply, b"+TERM")
            return
        if self._connection.clock.left_ns(work.deadline_ns) <= 0:
            await self._connection.publish(message.reply, b"+ACK")  # its client has its answer: the deadline passed
            self._metrics.record_item(work.model, "expired")
            return
        if work.id in self._running:  # delivered again; the run under way acknowledges it
            return
        if self.is_stopping:
            await self._give_back(message, 0)
            return
        self._credit.begin()
        running = self._running[work.id] = Running(work, message)
        running.task = asyncio.get_running_loop().create_task(self._run(running))

    async def _give_back(self, message: Msg, delay_s: float) -> None:
        """Have the server deliver an item again, to any host."""
        await self._connection.publish(message.reply, b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode())

    # --- running --------------------------------------------------------------------------------------------------

    async def _run(self, running: Running) -> None:
        work, num_tokens = running.work, 0
        try:
            failpoints.reach("cluster.taken")
            try:
                answer = await self._answer(work)
                num_tokens = answer.num_tokens
                result = await self._result(work, answer)
            except SieError as error:
                if await self._is_returned(running, error):
                    self._metrics.record_item(work.model, "returned")
                    return
                result = Result(VERSION, work.id, self._host, error=to_wire(error))
            except ProtocolError as error:
                _log.error("work item %s is refused: %s", work.id, error)
                result = Result(VERSION, work.id, self._host, error=to_wire(Internal(f"the host refused it: {error}")))
            except Exception:
                _log.exception("work item %s failed", work.id)
                result = Result(VERSION, work.id, self._host, error=to_wire(Internal("internal error")))
            await self._connection.publish(work.reply_to, encode(result))
            self._metrics.record_item(work.model, "answered" if result.error is None else "failed")
            failpoints.reach("cluster.published")
            await self._connection.publish(running.message.reply, b"+ACK")
        except Unavailable as error:  # not even the buffer takes it: the server delivers the item again
            _log.warning("an answer could not be published: %s", error.message)
        finally:
            self._running.pop(work.id, None)
            self._credit.end(num_tokens)
            self._num_done += 1
        with contextlib.suppress(Unavailable):
            await self._pull()

    async def _answer(self, work: Work) -> Answer:
        body = work.body
        if work.stored:
            body = await self._connection.fetch(self._lane.pool, work.stored)
        request = read_item(work.operation, work.model, body)
        deadline_ns = self._connection.clock.to_local(work.deadline_ns)
        return await run_item(self._process, work.operation, work.model, request, deadline_ns)

    async def _result(self, work: Work, answer: Answer) -> Result:
        """Return an answer as a result, with a large reply by reference."""
        stored, reply = "", answer.reply
        if len(reply) > INLINE_BYTES:
            stored, reply = (
                await self._connection.keep(self._lane.pool, f"{work.id}.{self._host}", reply),
                memoryview(b""),
            )
        return Result(
            VERSION, work.id, self._host, reply=reply, stored=stored, num_tokens=answer.num_tokens,
            image_tokens=answer.image_tokens, tokenization_ns=answer.tokenization_ns, queue_ns=answer.queue_ns,
            cuts=answer.cuts,
        )  # fmt: skip

    async def _is_returned(self, running: Running, error: SieError) -> bool:
        """Give an item back that another host may serve, and keep a copy of one that must not run again."""
        if isinstance(error, PoisonInput):
            # ORDER: before the result, after which the gateway deletes a body in the object store
            await bury(self._connection, self._lane, running.work, error.message, [self._host])
            return False
        is_ours = isinstance(error, Overloaded | WorkerLost) or error.code in _ELSEWHERE
        if not is_ours or self._connection.clock.left_ns(running.work.deadline_ns) <= 0:
            return False
        await self._give_back(running.message, _RETURN_S)
        return True

    # --- while it runs --------------------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Say which items are still running: to the server, and once to their gateways."""
        now_s = time.monotonic()
        told: defaultdict[str, list[str]] = defaultdict(list)
        for running in list(self._running.values()):
            if not running.is_told:
                running.is_told = True
                told[running.work.reply_to].append(running.work.id)
            if now_s - running.began_s >= _RENEW_S:
                running.began_s = now_s
                await self._connection.publish(running.message.reply, b"+WPI")
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
            tasks = [running.task for running in self._running.values() if running.task is not None]
            await asyncio.wait(tasks, timeout=min(_RENEW_S, max(0.0, deadline_s - time.monotonic())))
            await self._renew()
        for running in list(self._running.values()):
            if running.task is not None:
                running.task.cancel()
            await self._give_back(running.message, 0)
