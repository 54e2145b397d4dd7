"""Follows one answer that a host generates: its frames, its client, and its new beginning on another host."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Protocol

from sie.cluster.gateway.host_directory import Host
from sie.cluster.payloads import TextFrame, TextWork
from sie.cluster.text_events import decode_events
from sie.frontend.generation.generation_run import TokenMeter, add_event
from sie.values.errors import DeadlineExceeded, Internal, ProtocolError, SieError, WorkerLost, from_wire, untied
from sie.values.generate import (
    ChoiceReply,
    Ended,
    GenerateEvent,
    GenerateReply,
    GenerateUsage,
    PromptScored,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from sie.values.inference import Timing

_PATIENCE_NS: Final = 1_000_000_000
"""How long a host may be silent about a request before it is asked again."""


class RunOwner(Protocol):
    """The gateway's client of hosts, as a run knows it."""

    meter: TokenMeter

    def try_again(self, run: RemoteRun, error: SieError) -> bool:
        """Begin a run anew on another host; return whether that is under way."""
        ...

    def cancel(self, run: RemoteRun) -> None:
        """Have the host of a run stop."""
        ...

    def drop(self, run: RemoteRun) -> None:
        """Forget a run that has ended."""
        ...


class TextPending:
    """One generated answer in the form of the engine's `Pending`, through which a client that leaves ends it."""

    def __init__(self, run: RemoteRun, deadline_ns: int) -> None:
        self.run = run
        self.submitted_ns = time.monotonic_ns()
        self.deadline_ns = deadline_ns
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def reply(self) -> Any:
        """Wait until the answer has ended. Its content came as events before."""
        return await self.future

    def stop(self, choice: int) -> None:
        """Do nothing: the host stops its own choices."""


_NOTHING: Final = GenerateUsage(prompt_tokens=0, completion_tokens=0)


class RemoteRun:
    """One answer that a host generates. Take its events once, with `wait` or `async for`, or the whole with `whole`."""

    def __init__(self, owner: RunOwner, work: TextWork, deadline_ns: int, host: Host) -> None:
        self.model = work.model
        self.prompts: Sequence[str] = ()
        self.is_over = False
        self.num_prompts = 1
        self.work = work
        self.host = host.beat.host
        self.pool, self.lane = host.beat.pool, host.lane
        self.tried = {self.host}
        self.context = contextvars.copy_context()
        """The context of the request: hosts are chosen by its pool, its machine profile and its key."""
        self.has_begun = asyncio.Event()
        self._owner = owner
        self.is_sending = False
        """Whether its request is on its way to the host."""
        self.stored = ""
        """The name in the object store of a large request."""
        self.held: deque[TextFrame] = deque()
        """Frames that wait for one before them which is fetched from the object store."""
        self._pending = TextPending(self, deadline_ns)
        self._events: list[GenerateEvent] = []
        self._news = asyncio.Event()
        self._sequence = 0
        self._error: SieError | None = None
        self._is_sent = False
        self._usage = _NOTHING
        self._last_ns = 0
        self._asks_ns = 0
        self._patience_ns = 0
        self._hear(self._pending.submitted_ns)

    @property
    def pendings(self) -> list[TextPending]:
        """Its requests, which are abandoned when the client leaves."""
        return [self._pending]

    @property
    def deadline_ns(self) -> int:
        """When the run ends without a next frame, on the local clock."""
        return self._pending.deadline_ns

    @property
    def is_done(self) -> bool:
        """Whether nothing more comes."""
        return self._pending.future.done()

    # --- frames ---------------------------------------------------------------------------------------------------

    def _hear(self, now_ns: int) -> None:
        self._patience_ns = _PATIENCE_NS
        self._asks_ns = now_ns + self._patience_ns

    def asks_again(self, now_ns: int) -> bool:
        """Return whether no frame came for so long that its host may not know the request. Each time is twice as long."""
        if now_ns < self._asks_ns:
            return False
        self._patience_ns *= 2
        self._asks_ns = now_ns + self._patience_ns
        return True

    def feed(self, frame: TextFrame, now_ns: int, idle_ns: int) -> None:
        """Take in the next frame."""
        if self.is_done:
            return
        if frame.error is not None and self._owner.try_again(self, from_wire(frame.error)):
            return
        if frame.sequence == 0 and not self._is_sent:
            self._forget_events()  # the host had lost the request, and was asked again
        if frame.sequence != self._sequence:
            self.lose(f"frame {self._sequence} did not come")
            return
        self._sequence += 1
        self._hear(now_ns)
        try:
            events = decode_events(frame.events)
        except ProtocolError as fault:
            self.fail(Internal(f"the host's answer cannot be read: {fault}"))
            return
        if frame.sequence == 0 and frame.error is None:
            self.num_prompts, self.prompts = frame.num_prompts, frame.prompts
            self.has_begun.set()
        self._events += events
        if frame.prompt_tokens:
            self._usage = GenerateUsage(prompt_tokens=frame.prompt_tokens, completion_tokens=frame.completion_tokens)
        for event in events:
            if isinstance(event, Ended):
                self._usage = event.usage
        self._measure(events, now_ns)
        if events:
            self._pending.deadline_ns = now_ns + idle_ns
        if frame.error is not None:
            self.fail(from_wire(frame.error))
        elif frame.is_over:
            self._end(None)
        self._news.set()

    def _measure(self, events: Sequence[GenerateEvent], now_ns: int) -> None:
        if not any(isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta) for event in events):
            return
        meter = self._owner.meter
        if self._last_ns:
            meter.record_next_token(self.model, (now_ns - self._last_ns) / 1e9)
        else:
            meter.record_first_token(self.model, (now_ns - self._pending.submitted_ns) / 1e9)
        self._last_ns = now_ns

    def restart(self, work: TextWork, host: Host) -> bool:
        """Begin anew on another host, unless the client was sent something."""
        if self._is_sent or self.is_done:
            return False
        self.work, self.host, self.pool, self.lane = work, host.beat.host, host.beat.pool, host.lane
        self.tried.add(self.host)
        self._forget_events()
        self._hear(time.monotonic_ns())
        return True

    def _forget_events(self) -> None:
        self._events, self._sequence, self._usage = [], 0, _NOTHING

    def lose(self, reason: str) -> None:
        """Ask another host for the whole answer, because a part of it was lost. End with an error if that is too late."""
        lost = WorkerLost(f"a part of the answer was lost: {reason}")
        if not self._owner.try_again(self, lost):
            self.fail(lost)

    def fail(self, error: SieError) -> None:
        """End the answer with an error, which comes after the events before it."""
        if not self.is_done:
            self._error = untied(error)
            self._end(error)
            self._owner.cancel(self)

    def _end(self, error: SieError | None) -> None:
        self._owner.drop(self)
        if not self._pending.future.done():
            if error is None:
                self._pending.future.set_result(None)
            else:
                self._pending.future.set_exception(error)
                self._pending.future.exception()
        self.has_begun.set()
        self._news.set()

    # --- the client's side ----------------------------------------------------------------------------------------

    async def wait_first(self, timeout_s: float) -> None:
        """Wait for the first event, at most timeout_s. Raises the error of an answer that ended before it."""
        await self._wait_news(timeout_s)
        self.raise_early()

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s. Raises the error that ended the answer."""
        events = await self._next(timeout_s)
        self._is_sent = self._is_sent or bool(events)
        return events

    async def _wait_news(self, timeout_s: float | None) -> bool:
        """Wait for events or the end. Return False after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._events and not self.is_done:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _next(self, timeout_s: float | None) -> list[GenerateEvent]:
        if not await self._wait_news(timeout_s):
            return []
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise untied(self._error)
        self.is_over = self.is_over or any(isinstance(event, Ended) for event in events)
        if not events and self.is_done and not self.is_over:
            raise Internal("the host ended an answer that it had not finished")
        return events

    async def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        """Yield every event; raises as `wait` does."""
        while not self.is_over:
            for event in await self.wait(86_400.0):
                yield event

    async def whole(self) -> GenerateReply:
        """Return the whole answer. A lost host's request starts again elsewhere, so events are read at the end only."""
        events = await self.gather()
        choices: dict[int, ChoiceReply] = {
            number: ChoiceReply() for number in range(self.num_prompts * self.work.request.num_choices)
        }
        scored: dict[int, Any] = {}
        for event in events:
            if isinstance(event, PromptScored):
                scored[event.prompt] = event.tokens
            else:
                add_event(choices, event)
        return GenerateReply(
            model=self.model, choices=list(choices.values()), usage=self._usage,
            scored=[scored[prompt] for prompt in sorted(scored)],
        )  # fmt: skip

    async def gather(self) -> list[GenerateEvent]:
        """Return all events, when the answer is complete."""
        while not self.is_done:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise untied(self._error)
        return await self._next(None)

    def raise_early(self) -> None:
        """Raise the error of an answer that ended before its first event."""
        if self._error is not None and not self._events:
            raise untied(self._error)

    def give_up(self, error: SieError) -> None:
        """Cancel the answer; a caller that still waits gets this error."""
        self.fail(error)

    def timing(self, began_ns: int) -> Timing:
        """Return the timing of a request up to now; began_ns: when its headers were read."""
        now_ns, submitted_ns = time.monotonic_ns(), self._pending.submitted_ns
        return Timing(
            total_ms=(now_ns - began_ns) / 1e6, inference_ms=(now_ns - submitted_ns) / 1e6, submitted_ns=submitted_ns
        )

    def usage(self) -> GenerateUsage:
        """Return the usage up to the last frame, whether its events were taken or not."""
        return self._usage


def overdue(run: RemoteRun) -> SieError:
    """Return the error for an answer past its deadline."""
    if not run.has_begun.is_set():
        return DeadlineExceeded("the request's deadline passed before its first token was there")
    return DeadlineExceeded("no token came for stream_idle_timeout_s")
