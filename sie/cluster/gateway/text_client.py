"""Generates text on hosts: chooses one for each request, and follows its frames.

The host is chosen by load and by the first bytes of the conversation, so that turns of one conversation find the prefix
cache they filled. Until the client was sent something, a lost host's request starts again on another.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import msgspec

from sie.cluster.connection import INLINE_BYTES, Connection
from sie.cluster.gateway.directory import Host
from sie.cluster.large_payloads import pack, take
from sie.cluster.payloads import (
    VERSION,
    Cancel,
    CountWork,
    TextFrame,
    TextWork,
    count_result_decoder,
    decode,
    encode,
    text_frame_decoder,
)
from sie.cluster.subjects import Lane, answer_subject, host_subject, is_answer_of
from sie.cluster.text_events import decode_events
from sie.config.generation_settings import Generation
from sie.frontend.generation.generation_run import TokenMeter, add_event
from sie.frontend.generation.start import check_request, generate_rule
from sie.ipc.messages import ModelEntry
from sie.values.errors import (
    ClientGone,
    DeadlineExceeded,
    Internal,
    ProtocolError,
    SieError,
    Unavailable,
    WorkerLost,
    from_wire,
)
from sie.values.generate import (
    ChoiceReply,
    Ended,
    GenerateEvent,
    GenerateReply,
    GenerateRequest,
    GenerateUsage,
    PromptScored,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from sie.values.inference import Timing

ChooseHosts = Callable[[str], Sequence[Host]]
"""Returns the hosts that may serve a model for the request of the running task. Raises SieErrors."""
_PREFIX_BYTES: Final = 4096
_MAX_ATTEMPTS: Final = 3
_COUNT_S: Final = 10.0
_PATIENCE_NS: Final = 1_000_000_000
_ELSEWHERE: Final = frozenset(("SHUTTING_DOWN", "QUEUE_FULL", "MODEL_LOADING", "MODEL_NOT_LOADED", "WORKER_LOST"))
_encode_prefix: Final = msgspec.msgpack.Encoder().encode


class TextPending:
    """The part of a generated answer that a client's departure ends; a gateway's `Pending`."""

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

    def __init__(self, client: TextClient, work: TextWork, deadline_ns: int, host: Host) -> None:
        self.model = work.model
        self.prompts: Sequence[str] = ()
        self.is_over = False
        self.num_prompts = 1
        self.work = work
        self.host = host.beat.host
        self.pool, self.lane = host.beat.pool, host.lane
        self.num_attempts = 1
        self.tried = {self.host}
        self.context = contextvars.copy_context()
        """That of the request, by which hosts are chosen: its pool, its machine profile and its key."""
        self.has_begun = asyncio.Event()
        self._client = client
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
        """What a client's departure abandons."""
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
        if frame.error is not None and self._client.try_again(self, from_wire(frame.error)):
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
        meter = self._client.meter
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
        self.num_attempts += 1
        self._forget_events()
        self._hear(time.monotonic_ns())
        return True

    def _forget_events(self) -> None:
        self._events, self._sequence, self._usage = [], 0, _NOTHING

    def lose(self, reason: str) -> None:
        """Begin anew on another host after the loss of a part of the answer, or end."""
        lost = WorkerLost(f"a part of the answer was lost: {reason}")
        if not self._client.try_again(self, lost):
            self.fail(lost)

    def fail(self, error: SieError) -> None:
        """End the answer with an error, which comes after the events before it."""
        if not self.is_done:
            self._error = error
            self._end(error)
            self._client.cancel(self)

    def _end(self, error: SieError | None) -> None:
        self._client.drop(self)
        if not self._pending.future.done():
            if error is None:
                self._pending.future.set_result(None)
            else:
                self._pending.future.set_exception(error)
                self._pending.future.exception()
        self.has_begun.set()
        self._news.set()

    # --- the client's side ----------------------------------------------------------------------------------------

    async def wait(self, timeout_s: float) -> list[GenerateEvent]:
        """Return the next events, or an empty list after timeout_s. Raises the error that ended the answer."""
        events = await self._next(timeout_s)
        self._is_sent = self._is_sent or bool(events)
        return events

    async def _next(self, timeout_s: float | None) -> list[GenerateEvent]:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._events and not self.is_done:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return []
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise self._error
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
            raise self._error
        return await self._next(None)

    def raise_early(self) -> None:
        """Raise the error of an answer that ended before its first event."""
        if self._error is not None and not self._events:
            raise self._error

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


class TextClient:
    """Starts generated answers on hosts, and follows them."""

    def __init__(
        self,
        connection: Connection,
        gateway: str,
        choose_hosts: ChooseHosts,
        *,
        settings: Generation,
        meter: TokenMeter,
    ) -> None:
        self._connection = connection
        self._gateway = gateway
        self._choose_hosts = choose_hosts
        self._settings = settings
        self.meter = meter
        self._idle_ns = int(settings.stream_idle_timeout_s * 1e9)
        self._runs: dict[str, RemoteRun] = {}
        self._own: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """Answers that are not complete."""
        return len(self._runs)

    def by_lane(self) -> Counter[Lane]:
        """Return the answers that are not complete, by the lane of their hosts."""
        return Counter(run.lane for run in self._runs.values())

    async def start(
        self, entry: ModelEntry, request: GenerateRequest, deadline_ns: int, *, salt: bytes = b"", echoes: bool = False
    ) -> RemoteRun:
        """Have a host generate an answer; returns when the host has begun. Raises the host's errors."""
        generate_rule(entry.card)
        check_request(request, self._settings)
        host = self._choose(entry.card.id, request, set())
        work = TextWork(
            VERSION, f"{self._gateway}-t{next(self._numbers)}", self._gateway,
            answer_subject(self._gateway, host.beat.pool, "text"), self._connection.clock.to_server(deadline_ns), entry.card.id, request, salt, echoes,
        )  # fmt: skip
        run = RemoteRun(self, work, deadline_ns, host)
        self._runs[work.id] = run
        self._count(host.beat.host, 1)
        try:
            await self._send(run)
            await run.has_begun.wait()
        except BaseException:
            run.give_up(ClientGone("the request ended before its answer began"))
            raise
        run.raise_early()
        return run

    async def prompt_ids(self, entry: ModelEntry, request: GenerateRequest) -> list[list[int]]:
        """Return the tokens of a request's prompts, as a host counts them."""
        generate_rule(entry.card)
        check_request(request, self._settings)
        host = self._choose(entry.card.id, request, set())
        connection, pool, name = self._connection, host.beat.pool, f"{self._gateway}-c{next(self._numbers)}"
        work = CountWork(VERSION, entry.card.id, request)
        packed = await pack(connection, pool, name, work, request=GenerateRequest(model=entry.card.id))
        try:
            data = await connection.call(host_subject(pool, host.beat.host, "count"), packed, _COUNT_S)
            result = await take(connection, pool, decode(data, count_result_decoder), count_result_decoder)
        except ProtocolError as error:
            raise Internal(f"the host's answer cannot be read: {error}") from error
        if result.error is not None:
            raise from_wire(result.error)
        return result.prompts

    def close(self) -> None:
        """End every answer."""
        for run in list(self._runs.values()):
            run.give_up(Unavailable("The server is stopping", code="SHUTTING_DOWN", retry_after_s=1))

    # --- choosing -------------------------------------------------------------------------------------------------

    def _choose(self, model: str, request: GenerateRequest, tried: set[str]) -> Host:
        hosts = [host for host in self._choose_hosts(model) if host.beat.host not in tried]
        if not hosts:
            raise Unavailable(f"No host serves model '{model}' now", code="MODEL_LOADING", retry_after_s=1)
        return choose_host(hosts, prefix_of(request), self._own)

    def try_again(self, run: RemoteRun, error: SieError) -> bool:
        """Send a request to another host after a failure that is its host's own, if the client was sent nothing."""
        if error.code not in _ELSEWHERE or run.num_attempts >= _MAX_ATTEMPTS:
            return False
        try:
            host = run.context.run(self._choose, run.model, run.work.request, run.tried)
        except SieError:
            return False
        old_id, old_pool, old_host = run.work.id, run.pool, run.host
        reply_to = answer_subject(self._gateway, host.beat.pool, "text")
        work = msgspec.structs.replace(run.work, id=f"{self._gateway}-t{next(self._numbers)}", reply_to=reply_to)
        if not run.restart(work, host):
            return False
        self._runs.pop(old_id, None)
        self._count(old_host, -1)
        self._runs[work.id] = run
        self._count(host.beat.host, 1)
        self._spawn(self._cancel(old_pool, old_host, old_id))  # that host may only have been unreachable
        self._spawn(self._send(run))
        return True

    async def _send(self, run: RemoteRun) -> None:
        """Send a request to its host, with the time that is left now. Raises Overloaded and Unavailable."""
        subject = host_subject(run.pool, run.host, "text")
        work = msgspec.structs.replace(run.work, deadline_ns=self._connection.clock.to_server(run.deadline_ns))
        packed = encode(work)
        run.is_sending = True
        try:
            if len(packed) > INLINE_BYTES:
                packed = encode(await self._by_reference(run, work, packed))
            if self._runs.get(work.id) is run:  # it may have ended meanwhile
                await self._connection.publish(subject, packed)
            elif run.is_done and run.stored:
                await self._connection.forget(run.pool, run.stored)
        finally:
            run.is_sending = False

    async def _by_reference(self, run: RemoteRun, work: TextWork, packed: bytes) -> TextWork:
        """Return a request whose content lies in the object store."""
        if not run.stored:
            run.stored = await self._connection.keep(run.pool, work.id, packed)
        return msgspec.structs.replace(work, request=GenerateRequest(model=work.model), stored=run.stored)

    def on_connected(self) -> None:
        """Keep large requests anew before they are sent again: a restarted server may have lost them."""
        for run in self._runs.values():
            run.stored = ""

    def on_beat(self, host: str) -> None:
        """Send a host the requests again of which nothing was heard: it may have lost them, or a part of their answers.

        NATS drops what is published while a host connects again. A host ignores requests that it runs.
        """
        now_ns = time.monotonic_ns()
        for run in list(self._runs.values()):
            if run.host == host and not run.is_sending and not run.held and run.asks_again(now_ns):
                self._spawn(self._send(run))

    def _count(self, host: str, change: int) -> None:
        left = self._own.get(host, 0) + change
        self._own[host] = left
        if left <= 0:
            del self._own[host]

    # --- frames and ends ------------------------------------------------------------------------------------------

    def on_frame(self, frame: TextFrame, subject: str) -> None:
        """Take in a frame of an answer."""
        run = self._runs.get(frame.id)
        if run is None or not is_answer_of(subject, run.pool):
            return
        if run.held or frame.stored:
            run.held.append(frame)
            if len(run.held) == 1:
                self._spawn(self._feed_held(run))
        else:
            self._feed(run, frame)

    def _feed(self, run: RemoteRun, frame: TextFrame) -> None:
        run.feed(frame, time.monotonic_ns(), self._idle_ns)

    async def _feed_held(self, run: RemoteRun) -> None:
        """Feed the frames that wait, each when it is there."""
        while run.held:
            frame = run.held[0]
            try:
                frame = await take(self._connection, run.pool, frame, text_frame_decoder)
            except (SieError, ProtocolError) as error:
                if self._runs.get(frame.id) is run:
                    run.lose(f"frame {frame.sequence} cannot be read: {error}")
            else:
                if self._runs.get(frame.id) is run:
                    self._feed(run, frame)
            run.held.popleft()

    def cancel(self, run: RemoteRun) -> None:
        """Tell a host that nobody waits for an answer."""
        self._spawn(self._cancel(run.pool, run.host, run.work.id))

    async def _cancel(self, pool: str, host: str, work_id: str) -> None:
        await self._connection.publish(host_subject(pool, host, "cancel"), encode(Cancel(VERSION, work_id)))

    def drop(self, run: RemoteRun) -> None:
        """Forget an answer that is over."""
        if self._runs.pop(run.work.id, None) is not None:
            self._count(run.host, -1)
            if run.stored:
                self._spawn(self._connection.forget(run.pool, run.stored))

    def expire(self, now_ns: int) -> None:
        """End the answers that are overdue."""
        for run in [run for run in self._runs.values() if run.deadline_ns <= now_ns]:
            run.fail(overdue(run))

    def on_silent(self, silent: set[str]) -> None:
        """Start the answers of hosts that fell silent again elsewhere, or end them."""
        for run in [run for run in self._runs.values() if run.host in silent]:
            lost = WorkerLost("worker_lost: the host was lost while it generated; what it had sent stands")
            if not self.try_again(run, lost):
                run.fail(lost)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a message that cannot be sent: the host's silence ends the answer


def overdue(run: RemoteRun) -> SieError:
    """Return the error for an answer past its deadline."""
    if not run.has_begun.is_set():
        return DeadlineExceeded("the request's deadline passed before its first token was there")
    return DeadlineExceeded("no token came for stream_idle_timeout_s")


def prefix_of(request: GenerateRequest) -> bytes:
    """Return the first bytes of a request's messages, which decide where its prefix may be cached."""
    if request.messages is not None:
        head: Any = [(message.role, message.content) for message in request.messages[:2]]
    else:
        head = (request.texts or request.token_lists or [""])[0]
    return _encode_prefix([request.model, head])[:_PREFIX_BYTES]


def choose_host(hosts: Sequence[Host], prefix: bytes, own: dict[str, int]) -> Host:
    """Return the host that the prefix prefers, or the least loaded one if that has much more to do.

    own counts this gateway's answers by host: heartbeats know them only later. Rendezvous hashing keeps most prefixes
    where they are when hosts come and go.
    """

    def load(host: Host) -> float:
        return max(host.beat.num_texts, own.get(host.beat.host, 0)) / max(1, host.beat.num_workers)

    def rank(host: Host) -> bytes:
        return hashlib.blake2b(prefix, key=host.beat.host.encode()[:64], digest_size=8).digest()

    preferred, least = max(hosts, key=rank), min(hosts, key=load)
    return preferred if load(preferred) <= 2 * load(least) + 2 else least
