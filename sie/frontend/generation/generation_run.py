"""Runs one request to generate: its prompts on the engine, their events, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Protocol

from sie.frontend.engine.interface import Engine, Pending
from sie.frontend.engine.token_stream import TokenStream
from sie.frontend.generation.reader import Reader
from sie.values.errors import BadRequest, Internal, SieError, untied
from sie.values.generate import (
    GRAMMAR,
    ChoiceReply,
    Ended,
    Finished,
    GenerateEvent,
    GenerateReply,
    GenerateUsage,
    LogprobText,
    PromptScored,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
)
from sie.values.inference import Timing

_LONG_S: Final = 86_400.0
"""Only bounds one wait; the engine ends requests that take too long."""


class TokenMeter(Protocol):
    """Records the time that tokens took, in seconds."""

    def record_first_token(self, model: str, elapsed_s: float) -> None: ...
    def record_next_token(self, model: str, gap_s: float) -> None: ...


class Part:
    """One prompt: its submitted request and its reader of tokens. new_reader makes a fresh one after a restart."""

    __slots__ = ("last_ns", "new_reader", "num_prompt_tokens", "num_restarts", "pending", "reader", "stream")

    def __init__(
        self, pending: Pending, stream: TokenStream, new_reader: Callable[[], Reader], num_prompt_tokens: int
    ) -> None:
        self.pending = pending
        self.stream = stream
        self.new_reader = new_reader
        self.reader = new_reader()
        self.num_prompt_tokens = num_prompt_tokens
        self.num_restarts = 0
        self.last_ns = 0


class Run:
    """A submitted request. Take its events once, with `wait` or `async for`, or the whole answer with `whole`.

    A caller that stops before the last event must call `give_up`. began_ns: when the work on its prompts began
    (CLOCK_MONOTONIC).
    """

    def __init__(
        self, engine: Engine, model: str, parts: Sequence[Part], news: asyncio.Event,
        *, began_ns: int, meter: TokenMeter, prompts: Sequence[str] = (), grammar_field: str = GRAMMAR,
    ) -> None:  # fmt: skip
        """Take the parts, and the name of the field by which the client gave its grammar."""
        self.model = model
        """Id of the answering model."""
        self.prompts = prompts
        """Texts of its prompts, if the request wants them back; else empty."""
        self.parts = parts
        self.is_over = False
        """Whether the last event was taken."""
        self._engine = engine
        self._news = news
        self._began_ns = began_ns
        self._meter = meter
        self._grammar_field = grammar_field
        self._is_started = False
        self._error: SieError | None = None
        self._choices: dict[int, ChoiceReply] | None = None
        self._scored: dict[int, Sequence[LogprobText]] = {}
        self._submitted_ns = min(part.pending.submitted_ns for part in parts)

    @property
    def num_prompts(self) -> int:
        """The number of its prompts."""
        return len(self.parts)

    @property
    def pendings(self) -> list[Pending]:
        """Its requests on the engine."""
        return [part.pending for part in self.parts]

    async def wait_first(self, timeout_s: float) -> None:
        """Wait for the first token, at most timeout_s. Raises the error of a request that ended before it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), timeout_s)
        try:
            for part in self.parts:
                part.stream.raise_early()
        except SieError as error:
            raise self._with_field(error) from None

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s; the caller must send them now.

        Raises the error that ended the request, after the events before it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (events := self._collect()):
                    await self._news.wait()
        except TimeoutError:
            return []
        for part in self.parts:
            part.stream.is_sent = part.stream.is_sent or part.last_ns > 0
        return events

    async def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        """Yield every event; raises the errors of `wait`."""
        while not self.is_over:
            for event in await self.wait(_LONG_S):
                yield event

    async def whole(self) -> GenerateReply:
        """Return the whole answer. If its worker dies, another worker generates the answer from the start. Raises the error that ended it."""
        self._choices = {choice.number: ChoiceReply() for part in self.parts for choice in part.reader.choices}
        while not self.is_over:
            for event in self._collect():
                if isinstance(event, PromptScored):
                    self._scored[event.prompt] = event.tokens
                else:
                    add_event(self._choices, event)
            if not self.is_over:
                await self._news.wait()
        scored = [self._scored[prompt] for prompt in sorted(self._scored)]
        return GenerateReply(model=self.model, choices=list(self._choices.values()), usage=self.usage(), scored=scored)

    async def gather(self) -> list[GenerateEvent]:
        """Return all events of a request with one prompt. After a worker's death it begins again, as `whole` does."""
        (part,) = self.parts
        events: list[GenerateEvent] = []
        while not self.is_over:
            num_restarts = part.num_restarts
            news = self._collect()
            if part.num_restarts != num_restarts:
                events = events[:1]  # `Started` stays true after a restart
            events += news
            if not self.is_over:
                await self._news.wait()
        return events

    def give_up(self, error: SieError) -> None:
        """Abandon all its requests on the engine; a caller that still waits gets this error."""
        for part in self.parts:
            if not part.pending.future.done():
                self._engine.abandon(part.pending, error)

    def usage(self) -> GenerateUsage:
        """Return the usage so far."""
        first_ns = min((part.stream.first_ns for part in self.parts if part.stream.first_ns), default=0)
        last_ns = max(part.last_ns for part in self.parts)
        return GenerateUsage(
            prompt_tokens=sum(part.num_prompt_tokens for part in self.parts),
            completion_tokens=sum(part.reader.num_tokens for part in self.parts),
            cached_tokens=sum(part.reader.num_cached for part in self.parts),
            reasoning_tokens=sum(part.reader.num_reasoning_tokens for part in self.parts),
            prompt_s=max(0, first_ns - self._submitted_ns) / 1e9,
            completion_s=max(0, last_ns - first_ns) / 1e9,
        )

    def timing(self, began_ns: int) -> Timing:
        """Return the timing of a request up to now; began_ns: when its headers were read."""
        first = self.parts[0]
        submitted_ns, now_ns = first.pending.submitted_ns, time.monotonic_ns()
        totals = first.stream.totals
        queue_ns = max(0, totals.started_ns - submitted_ns) if totals is not None else 0
        return Timing(
            total_ms=(now_ns - began_ns) / 1e6,
            queue_ms=queue_ns / 1e6,
            tokenization_ms=(submitted_ns - self._began_ns) / 1e6,
            inference_ms=(now_ns - submitted_ns - queue_ns) / 1e6,
            submitted_ns=submitted_ns,
        )

    def _collect(self) -> list[GenerateEvent]:
        """Return the events since the last call."""
        self._news.clear()
        if self._error is not None:
            raise untied(self._error)
        events: list[GenerateEvent] = []
        try:
            for part in self.parts:
                self._read(part, events)
        except SieError as raised:
            error = self._with_field(raised)
            self.give_up(error)
            if not events:
                raise error from None
            self._error = untied(error)
            self._news.set()
        if events and not self._is_started:
            self._is_started = True
            usage = self.usage()
            events.insert(0, Started(usage.prompt_tokens, usage.cached_tokens))
        if not self.is_over and all(part.reader.is_finished for part in self.parts):
            self.is_over = True
            events.append(Ended(self.usage()))
        return events

    def _with_field(self, error: SieError) -> SieError:
        """Return an error with the client's own name of the field, if it is a worker's about the grammar."""
        if not isinstance(error, BadRequest) or error.extras.get("param") != GRAMMAR:
            return error
        problem, field = error.message.removeprefix(f"{GRAMMAR}: "), self._grammar_field
        return BadRequest(f"Field '{field}': {problem}", extras={"param": field})

    def _read(self, part: Part, events: list[GenerateEvent]) -> None:
        """Add the events of a part's new records."""
        if part.num_restarts != part.stream.num_restarts:
            self._begin_anew(part)
        reader = part.reader
        records = part.stream.take() if not reader.is_finished else []
        if not records:
            if part.stream.is_over and not reader.is_finished:
                raise Internal("the worker ended an answer that it had not finished")
            return
        if any(record.prompt is None for record in records):
            self._measure(part)
        for record in records:
            choice = reader.choices[record.choice]
            events += reader.read(record)
            if choice.is_finished and not record.finish:
                part.stream.stop(record.choice)
        if reader.is_finished and not part.pending.future.done():
            self._engine.finish(part.pending)

    def _begin_anew(self, part: Part) -> None:
        part.num_restarts = part.stream.num_restarts
        part.reader = part.new_reader()
        if self._choices is not None:
            self._choices.update({choice.number: ChoiceReply() for choice in part.reader.choices})

    def _measure(self, part: Part) -> None:
        now_ns = time.monotonic_ns()
        if part.last_ns:
            self._meter.record_next_token(self.model, (now_ns - part.last_ns) / 1e9)
        else:
            self._meter.record_first_token(self.model, (part.stream.first_ns - self._submitted_ns) / 1e9)
        part.last_ns = now_ns


def add_event(choices: Mapping[int, ChoiceReply], event: GenerateEvent) -> None:
    """Add an event to its choice."""
    match event:
        case TextDelta(choice, text, logprobs):
            choices[choice].text += text
            choices[choice].logprobs += logprobs
        case ReasoningDelta(choice, text, logprobs):
            choices[choice].reasoning += text
            choices[choice].logprobs += logprobs
        case ToolCallDelta(choice, _, call):
            choices[choice].calls.append(call)
            choices[choice].call_places.append(len(choices[choice].text))
        case Finished(choice, reason, stop_string):
            choices[choice].reason, choices[choice].stop_string = reason, stop_string
        case _:
            pass
