"""Generates answers that gateways ask this host for, and publishes their events as numbered frames.

An answer ends when its gateway cancels it or no longer beats. A frame is published when there are events, so nothing
waits for a slow client here: its gateway keeps the unread part, and cancels over its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from typing import Final

from nats.aio.msg import Msg

from sie.cluster.connection import Connection
from sie.cluster.host.item_run import find_entry
from sie.cluster.large_payloads import pack, take
from sie.cluster.payloads import (
    VERSION,
    CountResult,
    TextFrame,
    TextWork,
    cancel_decoder,
    count_work_decoder,
    decode,
    encode,
    gateway_beat_decoder,
    text_work_decoder,
)
from sie.cluster.text_events import encode_events
from sie.frontend.generation.interface import TextRun
from sie.frontend.process import FrontendProcess
from sie.runtime.logs import get_logger
from sie.values.errors import (
    ClientGone,
    Internal,
    Overloaded,
    ProtocolError,
    SieError,
    Unavailable,
    WorkerLost,
    to_wire,
)

_log = get_logger(__name__)
_STALE_S: Final = 4.0
_WAIT_S: Final = 1.0
_END_S: Final = 1.0


class Running:
    """One answer that is being generated."""

    __slots__ = ("lost", "sequence", "task", "work")

    def __init__(self, work: TextWork) -> None:
        self.work = work
        self.task: asyncio.Task[None] | None = None
        self.sequence = 0
        """The number of the next frame."""
        self.lost: WorkerLost | None = None
        """The error with which this host ends it; None where its gateway does, which needs none."""

    def end(self, lost: WorkerLost | None = None) -> None:
        """Generate no more."""
        self.lost = lost
        if self.task is not None:
            self.task.cancel()


class TextRuns:
    """The generated answers of one host."""

    def __init__(self, process: FrontendProcess, connection: Connection, pool: str) -> None:
        self._process = process
        self._connection = connection
        self._pool = pool
        self._running: dict[str, Running] = {}
        self._beats_s: dict[str, float] = {}
        self.is_stopping = False

    @property
    def num_running(self) -> int:
        """Answers that are being generated."""
        return len(self._running)

    async def on_text(self, message: Msg) -> None:
        """Start to generate an answer."""
        try:
            work = decode(message.data, text_work_decoder)
        except ProtocolError as error:
            _log.error("a request to generate is refused: %s", error)
            return
        if work.id in self._running or self._connection.clock.left_ns(work.deadline_ns) <= 0:
            return
        self._beats_s.setdefault(work.gateway, time.monotonic())
        running = self._running[work.id] = Running(work)
        running.task = asyncio.get_running_loop().create_task(self._run(running))
        running.task.add_done_callback(lambda _: self._running.pop(work.id, None))

    async def on_cancel(self, message: Msg) -> None:
        """End an answer that nobody waits for."""
        with contextlib.suppress(ProtocolError):
            running = self._running.get(decode(message.data, cancel_decoder).id)
            if running is not None:
                running.end()

    async def on_gateway_beat(self, message: Msg) -> None:
        """Note that a gateway lives."""
        with contextlib.suppress(ProtocolError):
            self._beats_s[decode(message.data, gateway_beat_decoder).gateway] = time.monotonic()

    def tick(self) -> None:
        """End the answers to gateways whose heartbeats have stopped.

        Each ends with an error, because its gateway may live and only be unreachable. Without NATS no heartbeat
        arrives; the client library keeps the errors until NATS is back.
        """
        now_s = time.monotonic()
        for running in list(self._running.values()):
            if running.lost is None and now_s - self._beats_s.get(running.work.gateway, 0.0) > _STALE_S:
                running.end(WorkerLost("worker_lost: the host heard nothing of the gateway for some seconds"))
        needed = {running.work.gateway for running in self._running.values()}
        for gateway in [name for name, beat_s in self._beats_s.items() if now_s - beat_s > _STALE_S]:
            if gateway not in needed:
                del self._beats_s[gateway]

    # --- one answer -----------------------------------------------------------------------------------------------

    async def _run(self, running: Running) -> None:
        run: TextRun | None = None
        try:
            run = await self._start(running.work)
            await self._send(running, run)
        except asyncio.CancelledError:
            if running.lost is not None:
                await self._fail(running, running.lost)
            raise
        except SieError as error:
            await self._fail(running, error)
        except Exception as error:
            if not isinstance(error, ProtocolError):
                _log.exception("generating for a gateway failed")
            await self._fail(running, Internal("internal error"))
        finally:
            if run is not None and not run.is_over:
                run.give_up(ClientGone("the gateway no longer waits for the answer"))

    async def _fail(self, running: Running, error: SieError) -> None:
        with contextlib.suppress(Unavailable):
            await self._publish(running, TextFrame(VERSION, running.work.id, running.sequence, error=to_wire(error)))

    async def _publish(self, running: Running, frame: TextFrame) -> None:
        name = f"{frame.id}.{frame.sequence}"
        packed = await pack(self._connection, self._pool, name, frame, events=[], prompts=[])
        await self._connection.publish(running.work.reply_to, packed)
        running.sequence += 1

    async def _start(self, work: TextWork) -> TextRun:
        process = self._process
        if self.is_stopping:
            raise Unavailable("The host is stopping", code="SHUTTING_DOWN", retry_after_s=1)
        if self.num_running > process.settings.cluster.max_text_runs:
            raise Overloaded("The host generates max_text_runs answers already", retry_after_s=1)
        entry, request = find_entry(process, work.model), work.request
        if work.stored:
            data = await self._connection.fetch(self._pool, work.stored)
            request = decode(data, text_work_decoder).request
        deadline_ns = self._connection.clock.to_local(work.deadline_ns)
        return await process.generator.start(entry, request, deadline_ns, salt=work.salt, echoes=work.echoes)

    async def _send(self, running: Running, run: TextRun) -> None:
        """Publish that an answer has begun, its events, and at last its end. Raises the error that ended it."""
        name = running.work.id
        await self._publish(
            running, TextFrame(VERSION, name, 0, num_prompts=run.num_prompts, prompts=list(run.prompts))
        )
        while not run.is_over:
            events = await run.wait(_WAIT_S)
            if events:
                usage = run.usage()
                await self._publish(running, TextFrame(
                    VERSION, name, running.sequence, encode_events(events), run.is_over,
                    prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens,
                ))  # fmt: skip

    async def on_count(self, message: Msg) -> None:
        """Answer with the tokens of a request's prompts."""
        try:
            packed = await self._count(message.data)
        except SieError as error:
            packed = encode(CountResult(VERSION, to_wire(error)))
        except ProtocolError as error:
            packed = encode(CountResult(VERSION, to_wire(Internal(f"the host refused it: {error}"))))
        await self._connection.publish(message.reply, packed)

    async def _count(self, data: bytes) -> bytes:
        work = decode(data, count_work_decoder)
        entry = find_entry(self._process, work.model)
        work = await take(self._connection, self._pool, work, count_work_decoder)
        result = CountResult(VERSION, prompts=await self._process.generator.prompt_ids(entry, work.request))
        return await pack(self._connection, self._pool, f"count.{secrets.token_hex(8)}", result, prompts=[])

    async def drain(self, deadline_s: float) -> None:
        """Take nothing more, and wait for the answers under way, at most until deadline_s. Gateways hear of the end of the others."""
        self.is_stopping = True
        while self._running and time.monotonic() < deadline_s:
            await self._wait_ended(min(0.2, deadline_s - time.monotonic()))
        for running in self._running.values():
            running.end(WorkerLost("worker_lost: the host stopped while it generated; what it had sent stands"))
        await self._wait_ended(_END_S)

    async def _wait_ended(self, timeout_s: float) -> None:
        tasks = [running.task for running in self._running.values() if running.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, timeout_s))
