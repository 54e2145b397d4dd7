"""Generates answers that gateways ask this host for, and publishes their events as numbered frames.

An answer ends when its gateway cancels it or no longer beats. A frame is published when there are events, so nothing
waits for a slow client here: its gateway keeps what it has not read, and cancels over its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

from nats.aio.msg import Msg

from sie.cluster.connection import Connection
from sie.cluster.host.item_run import find_entry
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
from sie.values.errors import ClientGone, Internal, Overloaded, ProtocolError, SieError, Unavailable, to_wire

_log = get_logger(__name__)
_STALE_S: Final = 4.0
_WAIT_S: Final = 1.0


class TextRuns:
    """The generated answers of one host."""

    def __init__(self, process: FrontendProcess, connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gateways: dict[str, str] = {}
        self._beats_s: dict[str, float] = {}
        self.is_stopping = False

    @property
    def num_running(self) -> int:
        """Answers that are being generated."""
        return len(self._tasks)

    async def on_text(self, message: Msg) -> None:
        """Start to generate an answer."""
        try:
            work = decode(message.data, text_work_decoder)
        except ProtocolError as error:
            _log.error("a request to generate is refused: %s", error)
            return
        if work.id in self._tasks or self._connection.clock.left_ns(work.deadline_ns) <= 0:
            return
        self._beats_s.setdefault(work.gateway, time.monotonic())
        self._gateways[work.id] = work.gateway
        task = self._tasks[work.id] = asyncio.get_running_loop().create_task(self._run(work))
        task.add_done_callback(lambda _: self._forget(work.id))

    def _forget(self, work_id: str) -> None:
        self._tasks.pop(work_id, None)
        self._gateways.pop(work_id, None)

    async def on_cancel(self, message: Msg) -> None:
        """End an answer that nobody waits for."""
        with contextlib.suppress(ProtocolError):
            task = self._tasks.get(decode(message.data, cancel_decoder).id)
            if task is not None:
                task.cancel()

    async def on_gateway_beat(self, message: Msg) -> None:
        """Note that a gateway lives."""
        with contextlib.suppress(ProtocolError):
            self._beats_s[decode(message.data, gateway_beat_decoder).gateway] = time.monotonic()

    def tick(self) -> None:
        """End the answers of gateways that no longer beat. Without NATS no gateway beats, and nobody could read them."""
        now_s = time.monotonic()
        for work_id, gateway in list(self._gateways.items()):
            if now_s - self._beats_s.get(gateway, 0.0) > _STALE_S:
                self._tasks[work_id].cancel()
        for gateway in [name for name, beat_s in self._beats_s.items() if now_s - beat_s > _STALE_S]:
            if gateway not in self._gateways.values():
                del self._beats_s[gateway]

    # --- one answer -----------------------------------------------------------------------------------------------

    async def _run(self, work: TextWork) -> None:
        try:
            run = await self._start(work)
        except Exception as error:
            if not isinstance(error, SieError | ProtocolError):
                _log.exception("generating for a gateway failed")
            await self._fail(work, 0, error if isinstance(error, SieError) else Internal("internal error"))
            return
        try:
            await self._send(work, run)
        finally:
            if not run.is_over:
                run.give_up(ClientGone("the gateway no longer waits for the answer"))

    async def _fail(self, work: TextWork, sequence: int, error: SieError) -> None:
        with contextlib.suppress(Unavailable):
            frame = TextFrame(VERSION, work.id, sequence, error=to_wire(error))
            await self._connection.publish(work.reply_to, encode(frame))

    async def _start(self, work: TextWork) -> TextRun:
        process = self._process
        if self.is_stopping:
            raise Unavailable("The host is stopping", code="SHUTTING_DOWN", retry_after_s=1)
        if self.num_running > process.settings.cluster.max_text_runs:
            raise Overloaded("The host generates max_text_runs answers already", retry_after_s=1)
        entry = find_entry(process, work.model)
        deadline_ns = self._connection.clock.to_local(work.deadline_ns)
        return await process.generator.start(entry, work.request, deadline_ns, salt=work.salt, echoes=work.echoes)

    async def _send(self, work: TextWork, run: TextRun) -> None:
        """Publish that an answer has begun, its events, and at last its end or the error that ended it."""
        frame = TextFrame(VERSION, work.id, 0, num_prompts=run.num_prompts, prompts=list(run.prompts))
        await self._connection.publish(work.reply_to, encode(frame))
        sequence = 1
        try:
            while not run.is_over:
                events = await run.wait(_WAIT_S)
                if events:
                    usage = run.usage()
                    frame = TextFrame(
                        VERSION, work.id, sequence, encode_events(events), run.is_over,
                        prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens,
                    )  # fmt: skip
                    await self._connection.publish(work.reply_to, encode(frame))
                    sequence += 1
        except SieError as error:
            await self._fail(work, sequence, error)

    async def on_count(self, message: Msg) -> None:
        """Answer with the tokens of a request's prompts."""
        try:
            work = decode(message.data, count_work_decoder)
            entry = find_entry(self._process, work.model)
            result = CountResult(VERSION, prompts=await self._process.generator.prompt_ids(entry, work.request))
        except SieError as error:
            result = CountResult(VERSION, to_wire(error))
        except ProtocolError as error:
            result = CountResult(VERSION, to_wire(Internal(f"the host refused it: {error}")))
        await self._connection.publish(message.reply, encode(result))

    async def drain(self, deadline_s: float) -> None:
        """Take nothing more, and wait for the answers under way, at most until deadline_s."""
        self.is_stopping = True
        while self._tasks and time.monotonic() < deadline_s:
            await asyncio.wait(list(self._tasks.values()), timeout=max(0.0, min(0.2, deadline_s - time.monotonic())))
