"""Runs the rounds of one request: generate, run the calls, and generate again with their results.

Rounds count from 0. The text of every round is passed on; the end of a round only if it is the last. A round whose calls
are all the server's has a next round. If it also called functions of the client, those calls go to the client and the
run ends. The cap of rounds, a call that nobody here runs and an answer cut by `max_tokens` end it, too, and so do results
that leave no room in the model's context.

    start(request) -> Generating      one round on the engine; a dead worker's round begins again if nothing was sent
    AgentLink                         the agent process, which runs the calls
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, Protocol

import msgspec

from sie.agents.loop.calls import AgentLink, CallRunner
from sie.agents.loop.plan import AgentPlan
from sie.agents.messages import FindFiles, FoundFiles
from sie.agents.tools import SURFACE
from sie.runtime.event_queue import EventQueue
from sie.runtime.logs import get_logger
from sie.values.agent import AgentFile, AgentOutcome, FileProduced
from sie.values.errors import BadRequest, DeadlineExceeded, Internal, Overloaded, SieError, Unavailable
from sie.values.generate import (
    ChatMessage,
    ChoiceReply,
    Ended,
    Finished,
    GenerateEvent,
    GenerateReply,
    GenerateRequest,
    GenerateUsage,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    with_answer,
)
from sie.values.inference import Timing

_log = get_logger(__name__)
_LONG_S: Final = 86_400.0
_ATTEMPTS: Final = 3
"""Attempts at a round, as long as nothing of it was sent to the client."""
_MAX_FILES: Final = 64
"""Most files of one answer."""


class Generating(Protocol):
    """One round on the engine; `sie.frontend.generation.generation_run.Run` is one."""

    model: str

    @property
    def is_over(self) -> bool: ...
    async def wait(self, timeout_s: float) -> list[GenerateEvent]: ...
    async def gather(self) -> list[GenerateEvent]: ...
    def give_up(self, error: SieError) -> None: ...
    def timing(self, began_ns: int) -> Timing: ...
    def usage(self) -> GenerateUsage: ...


Start = Callable[[GenerateRequest], Awaitable[Generating]]


class AgentRun:
    """A run of rounds. Take its events once, with `wait` or `gather`, or the whole answer with `whole`.

    A caller that stops before the last event must call `give_up`.
    """

    prompts: tuple[str, ...] = ()

    def __init__(self, first: Generating, start: Start, plan: AgentPlan, link: AgentLink, *, owner: str) -> None:
        """Take the first round as `first`. It has been submitted already, so that its errors get a status of their own."""
        self.model = first.model
        self.session = plan.task.session or secrets.token_hex(16)
        self._run_id = secrets.token_hex(6)
        self._start = start
        self._request = plan.request
        self._plan = plan
        self._link = link
        self._owner = owner
        self._round = first
        self._num_earlier = 0
        self._queue = EventQueue()
        self._files: list[AgentFile] = []
        self.said: list[ChatMessage] = []
        """The messages of all rounds: the calls of the server with their results, and the last answer."""
        self._last = ChoiceReply()
        self._usage = GenerateUsage(prompt_tokens=0, completion_tokens=0)
        self._is_started = False
        self._why: SieError | None = None
        self._calls = CallRunner(
            link, plan, self._emit, owner=owner, session=self.session, run_id=self._run_id
        )  # fmt: skip
        self._task = asyncio.get_running_loop().create_task(self._drive())

    # --- for its reader ---------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the last event was taken."""
        return self._queue.is_over

    @property
    def has_acted(self) -> bool:
        """Whether a tool has run, so that the run must not begin again."""
        return self._calls.has_begun

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s. Raises the error that ended the run."""
        return await self._queue.take(timeout_s)

    async def __aiter__(self) -> AsyncIterator[GenerateEvent]:
        """Yield every event; raises as `wait` does."""
        while not self.is_over:
            for event in await self.wait(_LONG_S):
                yield event

    async def gather(self) -> list[GenerateEvent]:
        """Return all events. Raises the error that ended the run."""
        return [event async for event in self]

    async def whole(self) -> GenerateReply:
        """Return the answer of the last round, with the calls and files of all rounds."""
        async for _ in self:
            pass
        outcome = AgentOutcome(session=self.session, records=tuple(self._calls.records), files=tuple(self._files))
        return GenerateReply(model=self.model, choices=[self._last], usage=self._usage, agent=outcome)

    def give_up(self, error: SieError) -> None:
        """Stop the round and the call that run now; a caller that still waits gets this error."""
        if not self._task.done() and self._why is None:
            self._why = error
            self._task.cancel()
        self._queue.end(error)

    def on_end(self, callback: Callable[[], object]) -> None:
        """Call this once when the run is over."""
        self._task.add_done_callback(lambda _task: callback())

    def timing(self, began_ns: int) -> Timing:
        """Return the timing of the latest round."""
        return msgspec.structs.replace(self._round.timing(began_ns), num_earlier=self._num_earlier)

    def usage(self) -> GenerateUsage:
        """Return the usage of all rounds so far."""
        return self._usage if self._round.is_over else _sum(self._usage, self._round.usage())

    # --- rounds -----------------------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Run all rounds; end the events with whatever ended the rounds."""
        error: SieError | None = None
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._run_rounds()
        except TimeoutError:
            error = DeadlineExceeded(f"The tools took longer than agent_timeout_s ({self._plan.timeout_s:g} s)")
        except asyncio.CancelledError:
            error = self._why or Internal("the run was cancelled")
        except SieError as raised:
            error = raised
        except Exception:
            _log.exception("a run of tools failed")
            error = Internal("internal error")
        finally:
            if error is not None and self.has_acted:
                error.may_be_repeated = False
            self._queue.end(error)

    async def _run_rounds(self) -> None:
        said, number = await self._generate(self._request, 0), 0
        while True:
            own = [call for call in said.choice.calls if self._plan.runs(call.name)]
            is_last = not own or number >= self._plan.max_rounds or said.choice.reason == "length"
            if is_last:
                self.said.append(said.choice.to_message())
                await self._finish(said, said.choice.calls, number)
                return
            results = [await self._calls.run(call, number, turn) for turn, call in enumerate(own)]
            others = [call for call in said.choice.calls if call not in own]
            self.said.append(msgspec.structs.replace(said.choice.to_message(), tool_calls=tuple(own)))
            self.said += [_result(call, text) for call, text in zip(own, results, strict=True)]
            if others:
                self.said.append(ChoiceReply(calls=others).to_message())
                await self._finish(said, others, number)
                return
            number += 1
            following = await self._follow(number)
            if following is None:
                await self._finish(said.cut(), [], number)
                return
            said = following

    async def _follow(self, number: int) -> _Said | None:
        """Run a later round. Return None if the budget of tokens or the model's context has no room for its answer."""
        request = self._next_request()
        if request.max_tokens == 0:
            self.said.append(ChoiceReply().to_message())
            return None
        try:
            return await self._generate(request, number)
        except BadRequest as error:
            if error.code != "CONTEXT_LENGTH_EXCEEDED":
                raise
            _log.info("a run of tools ends, because their results do not fit: %s", error)
            self._forget_results()
            return None

    def _forget_results(self) -> None:
        """Leave the calls of the latest round out of the conversation, which could not be continued with their results."""
        while (last := self.said.pop()).role == "tool":
            pass
        self.said.append(msgspec.structs.replace(last, content=last.content or "", tool_calls=()))

    def _next_request(self) -> GenerateRequest:
        """Return the request of the next round. The model may choose its calls, and has the rest of the token budget."""
        messages = with_answer(self._request.messages or (), self.said, continues=self._request.continues)
        left = max(0, self._plan.max_tokens - self._usage.completion_tokens)
        most = self._request.max_tokens
        choice = self._request.tool_choice
        free = msgspec.structs.replace(choice, mode="auto") if choice.mode == "required" else choice
        return msgspec.structs.replace(
            self._request, messages=messages, tool_choice=free, continues=False,
            # An overlong prompt is cut to leave room for its most tokens: then the budget must not be that number.
            max_tokens=None if most is None and left and self._request.truncate_prompt else min(left if most is None else most, left),
        )  # fmt: skip

    async def _generate(self, request: GenerateRequest, number: int) -> _Said:
        """Run one round, and pass its text on."""
        said = _Said()
        for attempt in range(_ATTEMPTS):
            if number or attempt:
                self._round = await self._start(request)
                self._num_earlier = number
            try:
                await self._read(self._round, said, is_stream=request.stream)
            except Unavailable:  # its worker died, or its model was reloaded
                if said.is_begun or attempt == _ATTEMPTS - 1:
                    raise
            else:
                break
        return said

    async def _read(self, run: Generating, said: _Said, *, is_stream: bool) -> None:
        """Read one attempt at a round. An answer that is not streamed is read as a whole, so that it may begin again."""
        try:
            if not is_stream:
                self._take(await run.gather(), said)
                return
            while not run.is_over:
                self._take(await run.wait(_LONG_S), said)
        finally:
            run.give_up(self._why or Internal("the round is over"))

    def _take(self, events: list[GenerateEvent], said: _Said) -> None:
        for event in events:
            said.is_begun = True
            match event:
                case Started():
                    if not self._is_started:
                        self._is_started = True
                        self._emit(event)
                case TextDelta(_, text, logprobs):
                    said.choice.text += text
                    said.choice.logprobs += logprobs
                    self._emit(event)
                case ReasoningDelta(_, text, logprobs):
                    said.choice.reasoning += text
                    said.choice.logprobs += logprobs
                    self._emit(event)
                case ToolCallDelta(_, _, call):
                    said.choice.calls.append(call)
                case Finished(_, reason, stop_string):
                    said.choice.reason, said.choice.stop_string = reason, stop_string
                case Ended(usage):
                    self._usage = _sum(self._usage, usage)
                case _:
                    self._emit(event)

    async def _finish(self, said: _Said, calls: list[ToolCall], number: int) -> None:
        """Pass on the calls of the client, the files it asked for, and the end."""
        await self._find_missing(number)
        reason = said.choice.reason if said.choice.reason == "length" else "tool_calls" if calls else "stop"
        places = [len(said.choice.text)] * len(calls)
        self._last = msgspec.structs.replace(said.choice, calls=calls, call_places=places, reason=reason)
        for place, call in enumerate(calls):
            self._emit(ToolCallDelta(0, place, call))
        self._emit(Finished(0, reason, said.choice.stop_string))
        self._emit(Ended(self._usage, self.session))

    async def _find_missing(self, number: int) -> None:
        """Show the files that the request asked for and that no call has shown; placeholders stand for missing ones."""
        shown = {file.name for file in self._files if file.code is None}
        names = tuple(file.name for file in self._plan.task.files if file.name not in shown)
        if names:
            question = FindFiles(
                owner=self._owner, session=self.session, run_id=self._run_id, round=number, turn=0, names=names
            )
            for file in await self._find_files(question):
                self._emit(FileProduced(file))

    async def _find_files(self, question: FindFiles) -> Sequence[AgentFile]:
        """Return files with these names. A run whose answer is there does not fail because nobody can look for them."""
        try:
            return (await self._link.ask(question, FoundFiles)).files
        except (Unavailable, Overloaded) as error:
            source = {"tool": SURFACE, "round": question.round, "turn": question.turn}
            return [
                AgentFile(id=f"file_{question.run_id}_r{question.round}_x{place}", name=name, created_at=int(time.time()),
                          source=source, code="not_produced", message=error.message)
                for place, name in enumerate(question.names)
            ]  # fmt: skip

    def _emit(self, event: GenerateEvent) -> None:
        if isinstance(event, FileProduced):
            if len(self._files) >= _MAX_FILES:
                return
            self._files.append(event.file)
        self._queue.push(event)


class _Said:
    """The answer of a round."""

    def __init__(self) -> None:
        self.choice = ChoiceReply()
        self.is_begun = False
        """Whether its first event was taken."""

    def cut(self) -> _Said:
        """Return the same, ended by the budget of tokens."""
        self.choice.reason, self.choice.stop_string = "length", None
        return self


def _result(call: ToolCall, text: str) -> ChatMessage:
    return ChatMessage(role="tool", content=text, name=call.name, tool_call_id=call.id)


def _sum(one: GenerateUsage, other: GenerateUsage) -> GenerateUsage:
    fields = GenerateUsage.__struct_fields__
    return GenerateUsage(**{field: getattr(one, field) + getattr(other, field) for field in fields})
